"""Do all ranks of the group mean the same communication, and can each of them run it?"""

from __future__ import annotations

import dataclasses
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_ep.collectives import CommBackend, by_rank
from moe_ep.errors import MoEEpConfigError, MoEEpPlatformError
from moe_ep.params import MoEEpCommParams
from moe_ep.version import __version__

if TYPE_CHECKING:
    from moe_ep.communication import MoEEpCommunication
    from moe_ep.config import CommunicationConfig


@dataclass(frozen=True)
class HostIdentity:
    """Names a running machine: two ranks with equal identities share its memory."""

    name: str
    boot_id: str

    @classmethod
    def of_this_process(cls) -> HostIdentity:
        """Return the identity of the machine that this process runs on."""
        boot_id = Path("/proc/sys/kernel/random/boot_id")
        return cls(socket.gethostname(), boot_id.read_text().strip() if boot_id.exists() else "")


@dataclass(frozen=True)
class _Declaration:
    values: dict[str, str]
    unsupported_reason: str | None
    host: HostIdentity


def agree_on_construction(
    backend: type[MoEEpCommunication],
    comm: CommBackend,
    params: MoEEpCommParams,
    config: CommunicationConfig,
    device: torch.device,
) -> None:
    """Raise on all ranks if they disagree (MoEEpConfigError) or one cannot run
    (MoEEpPlatformError). Collective."""
    values: dict[str, object] = {
        "backend": backend.backend_name,
        "moe_ep version": __version__,
        "device type": device.type,
        **{f.name: getattr(params, f.name) for f in dataclasses.fields(params)},
        "dtype": params.token_dtype,  # None and bfloat16 are the same
        **config.group_wide_settings(),
    }
    try:
        reason, host = backend.unsupported_reason(device), HostIdentity.of_this_process()
    except Exception as exc:  # a rank that raised here would leave its peers waiting
        reason, host = f"{type(exc).__name__}: {exc}", HostIdentity(socket.gethostname(), "")
    declarations: list[_Declaration] = comm.allgather(
        _Declaration({name: str(value) for name, value in values.items()}, reason, host)
    )
    _require_same_values(declarations)
    reasons = unsupported_reasons(
        backend, [d.unsupported_reason for d in declarations], [d.host for d in declarations]
    )
    if reasons is not None:
        raise MoEEpPlatformError(f"{backend.backend_name} cannot run on this group: {reasons}.")


def unsupported_reasons(
    backend: type[MoEEpCommunication], reasons: list[str | None], hosts: list[HostIdentity]
) -> str | None:
    """Return the table of why a group cannot run the backend, or None if it can.

    reasons, hosts: each rank's `unsupported_reason` and host.
    """
    names = [host.name for host in hosts]
    if any(reason is not None for reason in reasons):
        return by_rank(
            {r: "fine" if reason is None else reason for r, reason in enumerate(reasons)}, names
        )
    if backend.one_host_only and len(set(hosts)) > 1:
        return f"it needs all ranks on one host, and {by_rank(dict(enumerate(names)))}"
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
