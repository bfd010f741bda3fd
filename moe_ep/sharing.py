"""Can the ranks of a group share memory, and by which handles?

What each rank tells the others before any memory is made, and what all of them make of it. All see
the same answers, so all come to the same end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_ep import _native
from moe_ep.collectives import by_rank
from moe_ep.construction import HostIdentity
from moe_ep.errors import MoEEpConfigError, MoEEpPlatformError, MoEEpStateError

_TORCH_DIST = "Across hosts, use the backend torch_dist."


@dataclass(frozen=True)
class Place:
    """Where a rank's memory is, and how that memory can reach the other ranks.

    device: its torch type.
    gpu: of a CUDA device, for messages; "" for the CPU.
    gpu_uuid: the same in all processes; "" for the CPU.
    available_bytes: what may still be taken there.
    available_scope: ranks with the same scope draw on the same bytes.
    no_descriptor, no_fabric: why it cannot be shared by file descriptors, or by FABRIC handles; ""
        if it can.
    fabric: (cluster, clique) of the GPU's NVLink domain, None if it is in none.
    """

    device: str
    available_bytes: int
    available_scope: int | str
    gpu: str = ""
    gpu_uuid: str = ""
    no_descriptor: str = ""
    no_fabric: str = "only for GPUs"
    fabric: tuple[bytes, int] | None = None


@dataclass(frozen=True)
class Probe:
    """What a rank tells the others before any memory is made."""

    host: HostIdentity
    place: Place
    state: str
    segment_bytes: int
    mapped_bytes: int
    nonce: bytes


def place_of(device: torch.device) -> Place:
    """Return what this rank has to say about its device.

    Raises RuntimeError where a CUDA device cannot be used.
    """
    if device.type == "cpu":
        available_bytes, scope = _native.available_memory()
        return Place("cpu", available_bytes, scope)
    ordinal = cuda_ordinal(device)
    no_descriptor = _native.reason_against(ordinal, _native.HandleForm.FILE_DESCRIPTOR)
    no_fabric = _native.reason_against(ordinal, _native.HandleForm.FABRIC)
    found = _native.cuda_device(ordinal)
    return Place(
        "cuda",
        available_bytes=found.free_bytes,
        available_scope=found.uuid,
        gpu=f"cuda:{ordinal} ({found.name}, {found.uuid})",
        gpu_uuid=found.uuid,
        no_descriptor=no_descriptor,
        no_fabric=no_fabric,
        fabric=None if no_fabric else _native.gpu_fabric(found.uuid),
    )


def memory_kind(device: torch.device) -> _native.MemoryKind:
    """Return where the memory of a device comes from. Asks no driver.

    Raises MoEEpPlatformError for devices whose memory cannot be shared.
    """
    if device.type == "cpu":
        return _native.host_memory()
    if device.type == "cuda":
        return _native.cuda_memory(cuda_ordinal(device))
    raise MoEEpPlatformError(f"device must be a CPU or a CUDA device to share memory, got {device}")


def cuda_ordinal(device: torch.device) -> int:
    """Return the index of a CUDA device, torch's current one where the device names none."""
    return torch.cuda.current_device() if device.index is None else device.index


def check_probes(probes: Sequence[Probe]) -> None:
    """Raise, the same on all ranks, unless the group can allocate or restore together."""
    _require_equal("segment_bytes", [p.segment_bytes for p in probes])
    _require_equal("device", [p.place.device for p in probes])
    states = {p.state for p in probes}
    if states - {"released"} and states != {"mapped"}:
        table = by_rank({rank: p.state for rank, p in enumerate(probes)})
        raise MoEEpStateError(f"restore needs all ranks to have released the memory, got {table}.")
    if probes[0].place.device == "cpu":
        _check_one_host(probes)
    if states == {"released"}:
        _check_available(probes)


def forms_to_try(probes: Sequence[Probe]) -> list[_native.HandleForm]:
    """Return the forms of handle that can serve the whole group, the better ones first.

    Raises MoEEpPlatformError with every rank's answer if there is none.
    """
    one_host = _one_host(probes)
    forms = []
    if not any(p.place.no_fabric for p in probes) and (one_host or _one_nvlink_domain(probes)):
        forms.append(_native.HandleForm.FABRIC)
    if not any(p.place.no_descriptor for p in probes) and one_host and _one_network(probes):
        forms.append(_native.HandleForm.FILE_DESCRIPTOR)
    if not forms:
        table = by_rank({rank: _answers(p) for rank, p in enumerate(probes)})
        raise MoEEpPlatformError(
            f"the ranks of the group have no way in common to share GPU memory: {table}. File "
            "descriptors need all ranks on one host and in one network namespace. FABRIC handles "
            "need an IMEX channel (/dev/nvidia-caps-imex-channels) in every container and, across "
            f"hosts, all GPUs in one NVLink domain. {_TORCH_DIST}"
        )
    return forms


def mapping_error(
    own: Place, rank: int, peer: Place, device: torch.device, reason: Exception
) -> MoEEpPlatformError:
    """Return what to raise where the memory of a peer's GPU could not be mapped."""
    message = f"{own.gpu} cannot map the segment of rank {rank} on {peer.gpu}: {reason}"
    access = _native.can_access_peer(cuda_ordinal(device), peer.gpu_uuid)
    if not access:
        verdict = "There is" if access is False else "This process cannot see whether there is"
        message += (
            f". {verdict} no peer access (P2P) between these two GPUs: `nvidia-smi topo -p2p w` "
            "shows which have it. Choose GPUs that have, or use the backend torch_dist"
        )
    return MoEEpPlatformError(f"{message}.")


def _check_one_host(probes: Sequence[Probe]) -> None:
    if not _one_host(probes):
        hosts = by_rank({rank: p.host for rank, p in enumerate(probes)})
        raise MoEEpPlatformError(
            f"shared memory needs all ranks of the group on one host, got {hosts}. {_TORCH_DIST}"
        )
    if not _one_network(probes):
        networks = by_rank({rank: p.host.network for rank, p in enumerate(probes)})
        raise MoEEpPlatformError(
            f"shared memory needs all ranks of the group in one network namespace, got {networks}. "
            "Let the containers share it, or use the backend torch_dist."
        )


def _one_host(probes: Sequence[Probe]) -> bool:
    return len({p.host.boot_id for p in probes}) == 1


def _one_network(probes: Sequence[Probe]) -> bool:
    return len({p.host.network for p in probes}) == 1


def _one_nvlink_domain(probes: Sequence[Probe]) -> bool:
    return len({p.place.fabric for p in probes}) == 1 and probes[0].place.fabric is not None


def _answers(probe: Probe) -> str:
    place = probe.place
    domain = f"{place.fabric[0].hex()}/{place.fabric[1]}" if place.fabric else "none"
    return (
        f"file descriptors: {place.no_descriptor or 'fine'}, FABRIC: {place.no_fabric or 'fine'}, "
        f"NVLink domain: {domain}, host: {probe.host}"
    )


def _require_equal(name: str, values: Sequence[object]) -> None:
    if len(set(values)) > 1:
        table = by_rank(dict(enumerate(values)))
        raise MoEEpConfigError(f"{name} must be the same on all ranks, got {table}.")


def _check_available(probes: Sequence[Probe]) -> None:
    """All segments must fit together: a rank alone only knows about its own."""
    for scope in dict.fromkeys(p.place.available_scope for p in probes):
        ranks = [p for p in probes if p.place.available_scope == scope]
        needed = sum(p.mapped_bytes for p in ranks)
        available = min(p.place.available_bytes for p in ranks)
        if needed > available:
            gpu = ranks[0].place.gpu
            raise MoEEpPlatformError(
                f"{len(ranks)} segments of {ranks[0].mapped_bytes} bytes need {needed} bytes of "
                f"memory together{f' on {gpu}' if gpu else ''}, {available} are available. Lower "
                f"max_tokens_per_rank or the number of ranks on this {'GPU' if gpu else 'host'}."
            )
