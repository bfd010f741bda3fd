"""Which communications share a workspace? Those of one process, group and layout or arena.

All ranks of a group must come to the same answer: they tell each other what they have found.
"""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

import moe_ep.ops  # noqa: F401  (loads the ops)
from moe_ep._native import FifoGeometry, Geometry
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.collectives import CommBackend, agree, by_rank, group_behind
from moe_ep.config import CommunicationConfig
from moe_ep.errors import MoEEpStateError
from moe_ep.symmetric_memory import SymmetricMemory
from moe_ep.workspaces import BROKEN, DISPATCHED, RELEASED, Workspace

_IN_USE = (DISPATCHED, RELEASED)
Layout = TypeVar("Layout", Geometry, FifoGeometry)

# A process group is torch's, a comm_backend the user's: neither can hold something of ours. So the
# workspaces of a group are found here, for as long as a communication holds them.
_WORKSPACES: WeakValueDictionary[tuple[Hashable, ...], Workspace] = WeakValueDictionary()


def group_of(bootstrap: BootstrapConfig, comm_backend: object, comm: CommBackend) -> object:
    """Return what names the group of a communication; None: this process alone.

    comm_backend: of its config; comm: what it agrees over.
    """
    if comm_backend is None and bootstrap.process_group is not None:
        return bootstrap.process_group
    if comm_backend is None and bootstrap.world_size == 1:
        return None
    return group_behind(comm)


@dataclass(frozen=True)
class _Found:
    """What a rank has to share. name, state: "" where it has nothing. proposal: of a new name."""

    name: str
    state: str
    proposal: str


def join(
    comm: CommBackend, group: object, layout: Hashable, make: Callable[[], Workspace]
) -> Workspace:
    """Return the workspace that the group has for this layout, a new one where it has none.
    Collective; all ranks come to the same, or raise.

    group: see `group_of`. layout: all that must be equal for communications to take turns.
    make: returns a workspace of mapped memory; collective.
    """
    key = _key(comm, group, layout)
    found, answers = _look(comm, key)
    if len({(answer.name, answer.state) for answer in answers}) > 1 or answers[0].state in _IN_USE:
        # Perhaps by objects that were dropped in a cycle, and wait for the collector, which comes
        # at another time on each rank.
        found = None
        gc.collect()
        found, answers = _look(comm, key)
    if len({answer.name for answer in answers}) > 1:
        table = by_rank({rank: answer.name or "none" for rank, answer in enumerate(answers)})
        raise MoEEpStateError(
            "communications of one group and layout share a workspace, but the ranks do not find "
            f"the same one: {table}. Call destroy on those that are no longer used, or are broken, "
            "on all ranks before the next one is created."
        )
    if any(answer.state == RELEASED for answer in answers):
        raise MoEEpStateError(
            "the workspace that this communication would share is released: call "
            "checkpoint_restore on a communication that has it first."
        )
    if found is not None:
        return found
    made = make()
    try:
        made.initialize(comm)
    except BaseException:
        made.close()
        raise
    made.name, made.layout = answers[0].proposal, layout
    made.group = group  # held, so that no other object gets its id
    _WORKSPACES[key] = made
    return made


def join_memory(
    bootstrap: BootstrapConfig,
    comm: CommBackend,
    config: CommunicationConfig,
    layout: Layout,
    *apart: Hashable,
    initialize: Callable[[Tensor, Layout, int], None],
    forget: Callable[[Tensor, Layout, int], None] | None = None,
) -> Workspace:
    """Return a backend's workspace for a communication, of shared memory, which others may have,
    too. Collective.

    apart: what else must be equal for communications to take turns.
    initialize, forget: as of Workspace; called with the memory, the layout and the rank.
    """

    def make() -> Workspace:
        memory = SymmetricMemory.allocate(comm, layout.segment_bytes, bootstrap.torch_device)
        where = (memory.workspace, layout, bootstrap.rank)
        farewell = partial(torch.ops.moe_ep.leave, memory.workspace, bootstrap.rank)
        return Workspace(
            comm,
            bootstrap.rank,
            bootstrap.world_size,
            memory,
            initialize=partial(initialize, *where),
            forget=None if forget is None else partial(forget, *where),
            say_farewell=farewell,
        )

    what = (
        config.backend_name,
        str(bootstrap.torch_device),
        bootstrap.stream,  # rounds on several streams are not in order
        *apart,
        frozenset(config.arena),
        layout.fingerprint if config.arena else tuple(layout.fields()),
    )
    return join(comm, group_of(bootstrap, config.comm_backend, comm), what, make)


def _look(comm: CommBackend, key: tuple[Hashable, ...]) -> tuple[Workspace | None, list[_Found]]:
    """Return what this rank can share, and every rank's answer. Collective."""
    found = _WORKSPACES.get(key)
    if found is not None and found.state == BROKEN:
        found = None
    mine = _Found(
        name="" if found is None else found.name,
        state="" if found is None else found.state,
        proposal=secrets.token_hex(8),
    )
    return found, agree(comm, mine, what="looking for a workspace to share")


def move(workspace: Workspace, group: object) -> None:
    """Let a workspace that is restored over another group be found by that one."""
    if not workspace.name or group is workspace.group:
        return
    old = _key(workspace.comm, workspace.group, workspace.layout)
    if _WORKSPACES.get(old) is workspace:
        del _WORKSPACES[old]
    workspace.group = group
    _WORKSPACES.setdefault(_key(workspace.comm, group, workspace.layout), workspace)


def _key(comm: CommBackend, group: object, layout: Hashable) -> tuple[Hashable, ...]:
    # The process: a forked child has its parent's entries, and no part in their rounds.
    return os.getpid(), id(group), comm.get_rank(), layout
