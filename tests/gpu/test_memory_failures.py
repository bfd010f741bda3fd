"""Does an allocation of GPU memory that fails raise on all ranks, say why, and leave nothing?"""

from __future__ import annotations

import gc
import os
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest
import torch

from moe_ep import _native
from moe_ep.collectives import SingleRankComm
from moe_ep.errors import MoEEpConfigError, MoEEpPlatformError
from moe_ep.symmetric_memory import SymmetricMemory
from tests.conftest import RunOnRanks
from tests.gpu.shared_memory import (
    MIB,
    check_that_all_write_everywhere,
    free_bytes,
    group_of,
    on_gpus,
    one_gpu,
    warm_up,
)
from tests.ranks import RankContext

pytestmark = one_gpu


def fails(*arguments: object) -> None:
    raise RuntimeError("injected")


def fail_on_one_rank(context: RankContext, stage: str) -> str:
    device = torch.device("cuda", 0)
    with group_of(context) as comm:
        warm_up(comm, device, 256 * MIB)
        descriptors, free = len(os.listdir("/proc/self/fd")), free_bytes(comm, device)
        injection: AbstractContextManager[object] = nullcontext()
        if context.rank == 1:
            # A mock would remember the handle that it was called with.
            injection = mock.patch.object(_native.SegmentedMemory, stage, fails)
        with injection, pytest.raises(MoEEpPlatformError, match=r"rank 1: .*injected") as caught:
            SymmetricMemory.allocate(comm, 256 * MIB, device)
        message = str(caught.value)
        del caught  # its traceback holds the frames, and these the handle that was at hand
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert free - free_bytes(comm, device) < 64 * MIB
        check_that_all_write_everywhere(comm, SymmetricMemory.allocate(comm, 5 * MIB, device))
    return message


@pytest.mark.parametrize("stage", ["back_own_segment", "share_own_segment", "map_peer_segment"])
def test_failure_on_one_rank_raises_on_all_and_leaves_nothing(
    ranks: RunOnRanks, stage: str
) -> None:
    messages = on_gpus(ranks, 2, fail_on_one_rank, stage=stage)
    assert len(set(messages)) == 1
    if stage == "map_peer_segment":
        assert messages[0].count("GPU-") == 2  # who could not map whose


def ask_for_too_much(context: RankContext) -> str:
    device = torch.device("cuda", 0)
    with group_of(context) as comm:
        too_much = comm.allgather(free_bytes(comm, device) * 6 // 10)[0]
        with pytest.raises(MoEEpPlatformError) as caught:
            SymmetricMemory.allocate(comm, too_much, device)
        return str(caught.value)


def test_segments_that_do_not_fit_together_are_refused(ranks: RunOnRanks) -> None:
    messages = on_gpus(ranks, 2, ask_for_too_much)
    assert len(set(messages)) == 1
    assert "2 segments of" in messages[0]
    assert "on cuda:0 (" in messages[0]


def ask_for_too_much_alone(context: RankContext) -> str:
    _, total = torch.cuda.mem_get_info(0)
    memory = _native.SegmentedMemory(_native.cuda_memory(0), 0, 1, 2 * total)
    with pytest.raises(RuntimeError) as caught:
        memory.back_own_segment()
    assert memory.state == "released"
    return str(caught.value)


def test_memory_that_the_gpu_does_not_have_names_call_reason_and_advice(ranks: RunOnRanks) -> None:
    [message] = on_gpus(ranks, 1, ask_for_too_much_alone)
    for part in ("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", "cuda:0", "max_tokens_per_rank"):
        assert part in message


def mix_devices(context: RankContext) -> str:
    device = torch.device("cuda", 0) if context.rank else torch.device("cpu")
    with group_of(context) as comm, pytest.raises(MoEEpConfigError) as caught:
        SymmetricMemory.allocate(comm, MIB, device)
    return str(caught.value)


def test_cpu_and_gpu_in_one_group_are_refused(ranks: RunOnRanks) -> None:
    messages = on_gpus(ranks, 2, mix_devices)
    assert len(set(messages)) == 1
    assert "device must be the same on all ranks, got rank 0: cpu; rank 1: cuda" in messages[0]


def device_that_is_not_there(context: RankContext) -> str:
    with pytest.raises(MoEEpPlatformError) as caught:
        SymmetricMemory.allocate(SingleRankComm(), MIB, torch.device("cuda", 63))
    return str(caught.value)


def test_gpu_that_is_not_there_is_named(ranks: RunOnRanks) -> None:
    [message] = on_gpus(ranks, 1, device_that_is_not_there)
    for part in ("cuDeviceGet of cuda:63", "CUDA_ERROR_INVALID_DEVICE", "CUDA_VISIBLE_DEVICES"):
        assert part in message
