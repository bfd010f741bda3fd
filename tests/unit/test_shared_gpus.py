"""Is a group warned whose ranks have more of a GPU than there is? No GPU takes part."""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from moe_ep import (
    BootstrapConfig,
    CakeAlltoAllConfig,
    MoEEpCommParams,
    create_communication,
    shared_gpus,
)
from moe_ep.cake import kernels
from moe_ep.one_sided.workspace import geometry_of
from moe_ep.shared_gpus import (
    GpuShare,
    are_several,
    multiprocessors_of,
    warn_of_overlapping_shares,
)
from tests.unit.test_collectives import ThreadComm

A, B = "GPU-a", "GPU-b"
WHOLE = 132


def warnings_of(shares: Sequence[GpuShare | None], rank: int, whole: int | None) -> list[str]:
    with (
        mock.patch.object(shared_gpus, "multiprocessors_of", return_value=whole),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        warn_of_overlapping_shares(shares, rank)
    assert all(warning.category is RuntimeWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def on(uuid: str, *multiprocessors: int) -> list[GpuShare | None]:
    return [GpuShare(uuid, number) for number in multiprocessors]


@pytest.mark.parametrize(
    "shares",
    [
        on(A, 132, 132),
        on(A, 132, 66),
        on(A, 80, 80),
        on(A, *[34] * 5),
        on(B, 132) + on(A, 132) + on(A, 132),
        [None, *on(A, 132, 132)],
    ],
)
def test_shares_that_are_more_than_the_gpu_are_warned_of(shares: list[GpuShare | None]) -> None:
    (text,) = warnings_of(shares, len(shares) - 1, WHOLE)
    crowd = [rank for rank, share in enumerate(shares) if share is not None and share.uuid == A]
    for rank in crowd:
        assert warnings_of(shares, rank, WHOLE) == [text]
    own = shares[crowd[-1]]
    assert own is not None
    percentage = f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={100 // len(crowd)} "
    for part in ("132 multiprocessors (GPU-a)", "an MPS daemon", percentage, "tools/mps.py"):
        assert part in text, text
    assert f"{crowd[-1]}: {own.multiprocessors}." in text, text


@pytest.mark.parametrize(
    "shares",
    [
        on(A, 132),
        on(A, 132) + on(B, 132),
        on(A, 66, 66),
        on(A, *[18] * 8),  # 12.5 %, rounded up
        on(A, 100, 32),
        [None, None],
    ],
)
def test_shares_that_fit_are_not(shares: list[GpuShare | None]) -> None:
    for rank in range(len(shares)):
        assert warnings_of(shares, rank, WHOLE) == []


@pytest.mark.parametrize("whole", [None, 66])
def test_a_gpu_of_unknown_size_is_not_judged(whole: int | None) -> None:
    """66 is what 64 cores a multiprocessor would give."""
    assert warnings_of(on(A, 132, 132), 0, whole) == []


def test_ranks_on_the_cpu_have_no_share() -> None:
    assert GpuShare.of(torch.device("cpu")) is None


def test_the_group_learns_of_all_shares_when_it_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks as threads, on the CPU: only what they say of themselves is of a GPU."""
    monkeypatch.setattr(GpuShare, "of", lambda device: GpuShare(A, WHOLE))
    monkeypatch.setattr(shared_gpus, "multiprocessors_of", lambda uuid: WHOLE)
    objects: list[Any] = [None] * 2
    barrier = threading.Barrier(2)

    def create(rank: int) -> None:
        for _ in range(2):
            create_communication(
                BootstrapConfig(2, rank, device="cpu"),
                MoEEpCommParams(4, 2, 8, 16),
                "cake",
                comm_backend=ThreadComm(rank, objects, barrier),
            ).destroy()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        threads = [threading.Thread(target=create, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    (warning,) = (one for one in caught if one.category is RuntimeWarning)
    assert "ranks 0, 1: 132." in str(warning.message)


class Nvml:
    """Stands in for the library, on a machine with one H200."""

    def __init__(self, *, starts: bool = True) -> None:
        self.users, self.starts = 0, starts

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.users += self.starts
        return 0 if self.starts else 9

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.users -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:  # noqa: N802
        device._obj.value = 7
        return 0 if uuid == b"GPU-a" else 6

    def nvmlDeviceGetNumGpuCores(self, device: ctypes.c_void_p, cores: Any) -> int:  # noqa: N802
        cores._obj.value = 16896
        return 0 if device.value == 7 else 2


@pytest.mark.parametrize(
    ("nvml", "uuid", "wanted"),
    [(Nvml(), A, WHOLE), (Nvml(), B, None), (Nvml(starts=False), A, None), (object(), A, None)],
)
def test_the_size_of_a_gpu_is_nvmls(nvml: Any, uuid: str, wanted: int | None) -> None:
    with mock.patch.object(ctypes, "CDLL", return_value=nvml):
        assert multiprocessors_of(uuid) == wanted
    assert getattr(nvml, "users", 0) == 0


def test_without_nvml_the_size_is_unknown() -> None:
    with mock.patch.object(ctypes, "CDLL", side_effect=OSError("no such file")):
        assert multiprocessors_of(A) is None


@pytest.mark.parametrize(
    ("shares", "several"),
    [
        ([None, None], False),
        (on(A, 66, 66), False),
        (on(A, 66, 66) + on(B, 66, 66), True),
        (on(A, 132) + on(B, 132), True),
    ],
)
def test_gpus_are_told_apart_by_their_uuid(shares: list[GpuShare | None], several: bool) -> None:
    assert are_several(shares) is several


def test_the_workspace_takes_as_much_on_several_gpus_as_on_one() -> None:
    params = MoEEpCommParams(num_experts=8, top_k=2, max_tokens_per_rank=16, hidden_size=64)
    cuda = torch.device("cuda")
    one, several = (
        geometry_of(params, 4, CakeAlltoAllConfig(), cuda, spans_gpus=spans)
        for spans in (False, True)
    )
    assert one.segment_bytes == several.segment_bytes
    assert one.fields() != several.fields()


def test_signals_reach_other_gpus_unless_it_is_promised_that_there_are_none() -> None:
    params = MoEEpCommParams(num_experts=8, top_k=2, max_tokens_per_rank=16, hidden_size=64)
    cuda = torch.device("cuda")
    unsaid = geometry_of(params, 4, CakeAlltoAllConfig(), cuda)
    assert (
        unsaid.fields()
        == geometry_of(params, 4, CakeAlltoAllConfig(), cuda, spans_gpus=True).fields()
    )
    sizes = {"ep_size": 4, "num_experts": 8, "top_k": 2, "max_tokens_per_rank": 16}
    rows = {"dispatch_bytes_per_token": 128, "combine_bytes_per_token": 128}
    unsaid = kernels.Geometry(**sizes, **rows)
    assert unsaid.fields() == kernels.Geometry(**sizes, **rows, spans_gpus=1).fields()
