"""Do all ranks of the group mean the same communication, and can each of them run it?"""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from moe_ep.checks import check_construction
from moe_ep.collectives import CommBackend, agree, attempt, by_rank
from moe_ep.errors import MoEEpConfigError, MoEEpPlatformError
from moe_ep.params import MoEEpCommParams
from moe_ep.shared_gpus import GpuShare
from moe_ep.version import __version__

if TYPE_CHECKING:
    from moe_ep.communication import MoEEpCommunication
    from moe_ep.config import CommunicationConfig


_STEP = "creating the communication"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostIdentity:
    """Names what processes must have in common to share memory.

    name: the host's, for messages. Not compared: containers on one kernel may have their own.
    boot_id: the running kernel's; the host's name where the kernel does not tell.
    network: the network namespace, through whose sockets they hand memory over; "" if unknown.
    """

    name: str = field(compare=False)
    boot_id: str
    network: str = ""

    @classmethod
    def of_this_process(cls) -> HostIdentity:
        """Return where this process runs."""
        name = socket.gethostname()
        try:
            boot_id = _BOOT_ID.read_text().strip()
        except OSError:
            boot_id = ""
        return cls(name, boot_id or name, network_namespace())

    def __str__(self) -> str:
        network = f", {self.network}" if self.network else ""
        return f"{self.name} (boot id {self.boot_id}{network})"


def network_namespace() -> str:
    """Return which network namespace this process is in, "" if unknown."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


@dataclass(frozen=True)
class _Declaration:
    values: dict[str, str]
    unsupported_reason: str | None
    host: HostIdentity
    gpu: GpuShare | None


def agree_on_construction(
    backend: type[MoEEpCommunication],
    comm: CommBackend,
    params: MoEEpCommParams,
    config: CommunicationConfig,
    device: torch.device,
    eplb_stats_num_experts: int,
) -> list[GpuShare | None]:
    """Check the arguments of the constructor together with the other ranks; return each rank's
    share of its GPU. Collective.

    Raises on all ranks if an argument is wrong on one of them (TypeError, MoEEpConfigError), if
    they disagree (MoEEpConfigError) or if one cannot run (MoEEpPlatformError).
    """

    def declare() -> _Declaration:
        check_construction(params, config, eplb_stats_num_experts)
        values: dict[str, object] = {
            "backend": backend.backend_name,
            "moe_ep version": __version__,
            "device type": device.type,
            **{f.name: getattr(params, f.name) for f in dataclasses.fields(params)},
            "dtype": params.token_dtype,  # None and bfloat16 are the same
            **config.group_wide_settings(),
        }
        reason = own_reason_against(backend, device)
        return _Declaration(
            {name: str(value) for name, value in values.items()},
            reason,
            HostIdentity.of_this_process(),
            GpuShare.of(device) if reason is None else None,
        )

    declarations = agree(comm, attempt(declare), what=_STEP)
    _require_same_values(declarations)
    reasons = unsupported_reasons(
        backend, [d.unsupported_reason for d in declarations], [d.host for d in declarations]
    )
    if reasons is not None:
        raise MoEEpPlatformError(f"{backend.backend_name} cannot run on this group: {reasons}.")
    return [d.gpu for d in declarations]


def refuse_construction(comm: CommBackend, failure: Exception) -> NoReturn:
    """Raise on all ranks what stopped this one before `agree_on_construction`. Collective."""
    agree(comm, failure, what=_STEP)
    raise failure  # agree has raised


def own_reason_against(backend: type[MoEEpCommunication], device: torch.device) -> str | None:
    """Return why this rank cannot run the backend, or None if it can.

    Never raises: the other ranks wait for the answer.
    """
    try:
        return backend.unsupported_reason(device)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


def unsupported_reasons(
    backend: type[MoEEpCommunication], reasons: list[str | None], hosts: list[HostIdentity]
) -> str | None:
    """Return the table of why a group cannot run the backend, or None if it can.

    reasons, hosts: each rank's `own_reason_against` and host.
    """
    if any(reason is not None for reason in reasons):
        return by_rank(
            {r: "fine" if reason is None else reason for r, reason in enumerate(reasons)},
            [host.name for host in hosts],
        )
    if backend.one_host_only and len(set(hosts)) > 1:
        where = by_rank(dict(enumerate(hosts)))
        return f"it needs all ranks on one host and in one network namespace, got {where}"
    return None


def _require_same_values(declarations: list[_Declaration]) -> None:
    names = dict.fromkeys(name for d in declarations for name in d.values)
    by_name = {name: [d.values.get(name, "(none)") for d in declarations] for name in names}
    different = {name: given for name, given in by_name.items() if len(set(given)) > 1}
    if different:
        table = " | ".join(
            f"{name}: {by_rank(dict(enumerate(v)))}" for name, v in different.items()
        )
        raise MoEEpConfigError(
            f"the ranks of the group disagree: {table}. Create the communication with equal "
            "arguments on all ranks."
        )
