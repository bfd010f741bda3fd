"""How do ranks begin anew in a workspace, give its memory back and have it again? All or none.

What they do together for that is gathered over the group. Memory comes back at the same addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from moe_ep.collectives import CommBackend, agree, attempt, by_rank
from moe_ep.errors import MoEEpConfigError, MoEEpError, MoEEpStateError
from moe_ep.workspaces import (
    BROKEN,
    DISPATCHED,
    IDLE,
    INTERRUPTED,
    PREPARE,
    REINITIALIZE,
    RELEASED,
    RESTORE,
    Workspace,
)


def reinitialize(
    workspace: Workspace, comm: CommBackend, settle: Callable[[], None], *, in_part: bool
) -> None:
    """Begin anew in the same memory. Collective over `comm`; see
    MoEEpCommunication.reinitialize.

    settle: waits for own rounds, whatever became of them.
    in_part: whether some of the group's ranks may be missing.
    """

    def ready() -> int:
        _require_memory_to_reinitialize(workspace)
        size = comm.get_size()
        if not in_part and size != workspace.ep_size:
            raise MoEEpConfigError(
                f"comm_backend must have all {workspace.ep_size} ranks of the group, since no "
                f"mask leaves the others out (enable_rank_mask), got {size}"
            )
        settle()
        return workspace.ep_rank

    present = agree(comm, attempt(ready), what=REINITIALIZE)
    if len(set(present)) < len(present):
        raise MoEEpConfigError(
            f"comm_backend must have each rank of the group at most once, got {present}."
        )
    workspace.break_down(f"{REINITIALIZE} did not finish.")
    workspace.initialize(comm)
    for member in workspace.members:
        member._drop_round()
    workspace.backward = None
    workspace.state, workspace.broken_by = IDLE, INTERRUPTED


def prepare(workspace: Workspace, settle: Callable[[], None]) -> None:
    """Release the memory and keep its addresses. Collective, idempotent; see
    MoEEpCommunication.checkpoint_prepare.

    settle: waits for own rounds and raises what they recorded.
    """
    states = _meet(workspace, workspace.comm, PREPARE, settle)
    if set(states) == {RELEASED}:
        return
    workspace.break_down(f"{PREPARE} did not finish.")  # until it has: it may be interrupted
    try:
        release = (lambda: None) if workspace.memory is None else workspace.memory.release
        agree(workspace.comm, attempt(release), what=PREPARE)
    except BaseException as error:
        _break_off(workspace, error)
    workspace.state, workspace.broken_by = RELEASED, INTERRUPTED


def restore(workspace: Workspace, comm: CommBackend) -> None:
    """Put new memory behind the addresses. Collective over `comm`, idempotent; see
    MoEEpCommunication.checkpoint_restore.
    """
    states = _meet(workspace, comm, RESTORE)
    if set(states) == {IDLE}:
        workspace.comm = comm
        return
    if set(states) != {RELEASED}:
        table = by_rank(dict(enumerate(states)))
        raise MoEEpStateError(
            f"{RESTORE} needs all ranks to have released the memory, got {table}. Call "
            f"{PREPARE} on all of them first."
        )
    workspace.break_down(f"{RESTORE} did not finish.")
    try:
        if workspace.memory is not None:
            workspace.memory.restore(comm)
        workspace.initialize(comm)
    except BaseException as error:
        if workspace.memory is not None and workspace.memory.state == "released":
            # Nothing was made yet on any rank: they may try again.
            workspace.state, workspace.broken_by = RELEASED, INTERRUPTED
            raise
        _break_off(workspace, error)
    workspace.state, workspace.broken_by, workspace.comm = IDLE, INTERRUPTED, comm


def _require_memory_to_reinitialize(workspace: Workspace) -> None:
    if workspace.memory is None:
        raise MoEEpStateError(
            f"{REINITIALIZE} on a communication that has no memory: destroy it and create it "
            "again, over a new process group if a wait has expired."
        )
    if workspace.state == RELEASED:
        raise MoEEpStateError(
            f"{REINITIALIZE} while the memory is released: call {RESTORE} on all ranks, "
            "which begins anew as well."
        )
    if workspace.memory.state != "mapped":
        raise MoEEpStateError(
            f"{REINITIALIZE} without memory: {workspace.remedy}. It broke because: "
            f"{workspace.broken_by}"
        )


def _meet(
    workspace: Workspace, comm: CommBackend, call: str, settle: Callable[[], None] | None = None
) -> list[str]:
    """Return every rank's state; raise on all ranks if one of them is not between rounds."""

    def ready() -> str:
        rank, size = workspace.ep_rank, workspace.ep_size
        if (comm.get_rank(), comm.get_size()) != (rank, size):
            raise MoEEpConfigError(
                f"comm_backend must be rank {rank} of {size}, as when the "
                f"communication was created, got rank {comm.get_rank()} of {comm.get_size()}. "
                "Pass a group of the same ranks in the same order."
            )
        if workspace.state == DISPATCHED:
            raise MoEEpStateError(f"{call} while a round is open: call combine first.")
        if workspace.state == BROKEN:
            raise MoEEpStateError(
                f"{call} on a broken communication: {workspace.remedy}. It broke because: "
                f"{workspace.broken_by}"
            )
        if settle is not None and workspace.state == IDLE:
            settle()
        return workspace.state

    return agree(comm, attempt(ready), what=call)


def _break_off(workspace: Workspace, error: BaseException) -> NoReturn:
    """Raise for a step that some ranks have done and others not. The memory is gone then."""
    if workspace.memory is not None:
        workspace.memory.break_off()
    workspace.remedy = "restart the ranks"
    if not isinstance(error, MoEEpError):
        raise error
    workspace.broken_by = str(error)
    raise type(error)(
        f"{error} The workspace is broken on all ranks, and they must restart: what knows its "
        "addresses (CUDA graphs, views) has no memory behind them any more."
    ) from error.__cause__
