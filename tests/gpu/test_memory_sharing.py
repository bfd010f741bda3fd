"""Do all ranks see GPU memory that they share, by every kind of handle, and nothing beside it?"""

from __future__ import annotations

import os
import warnings
from unittest import mock

import pytest
import torch

from moe_ep import _native
from moe_ep.symmetric_memory import SymmetricMemory
from tests.conftest import RunOnRanks
from tests.gpu.shared_memory import (
    MIB,
    check_that_all_write_everywhere,
    free_bytes,
    group_of,
    on_gpus,
    one_gpu,
    settle,
    two_gpus,
    warm_up,
)
from tests.ranks import Outcome, RankContext

pytestmark = one_gpu

FABRIC = _native.HandleForm.FABRIC


def write_everywhere(
    context: RankContext,
    gpus: list[int],
    segment_bytes: int,
    only: _native.HandleForm | None = None,
) -> str:
    device = torch.device("cuda", gpus[context.rank])
    reason_against = _native.reason_against

    def reason(ordinal: int, form: _native.HandleForm) -> str:
        return reason_against(ordinal, form) if only in (None, form) else "not in this test"

    with group_of(context) as comm, mock.patch.object(_native, "reason_against", reason):
        memory = SymmetricMemory.allocate(comm, segment_bytes, device)
        assert memory.workspace.device == device
        check_that_all_write_everywhere(comm, memory)
    return str(memory.workspace.device)


@pytest.mark.parametrize(
    ("size", "segment_bytes"), [(1, 1), (1, 5 * MIB + 3), (2, 2 * MIB), (4, 5 * MIB + 4)]
)
def test_every_rank_on_one_gpu_sees_what_any_rank_writes(
    ranks: RunOnRanks, size: int, segment_bytes: int
) -> None:
    on_gpus(ranks, size, write_everywhere, gpus=[0] * size, segment_bytes=segment_bytes)


@two_gpus
@pytest.mark.parametrize("gpus", [[1, 0], [0, 0, 1, 1]])
def test_every_rank_on_two_gpus_sees_what_any_rank_writes(
    ranks: RunOnRanks, gpus: list[int]
) -> None:
    devices = on_gpus(
        ranks, len(gpus), write_everywhere, gpus=gpus, segment_bytes=33 * MIB, dedicated=True
    )
    assert devices == [f"cuda:{gpu}" for gpu in gpus]


def see_only_the_own_gpu(context: RankContext) -> str:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(context.rank)
    return write_everywhere(context, gpus=[0] * context.size, segment_bytes=5 * MIB)


@two_gpus
def test_ranks_that_see_only_their_own_gpu_share_memory(ranks: RunOnRanks) -> None:
    assert on_gpus(ranks, 2, see_only_the_own_gpu, dedicated=True) == ["cuda:0", "cuda:0"]


def fabric_works(context: RankContext) -> tuple[str, str]:
    """What the probe says, and what comes of the real thing."""
    said = _native.reason_against(0, FABRIC)
    memory = _native.SegmentedMemory(_native.cuda_memory(0), 0, 2, MIB)
    try:
        memory.back_own_segment(FABRIC)
        handle = memory.share_own_segment()
    except RuntimeError as error:
        assert memory.state == "released"
        return said, str(error)
    assert handle.fabric is not None
    assert any(handle.fabric)
    return said, ""


def test_probe_says_what_the_allocation_will(ranks: RunOnRanks) -> None:
    [(said, came)] = on_gpus(ranks, 1, fabric_works)
    assert (said == "") == (came == ""), (said, came)
    if came:
        assert "CUDA_ERROR" in came


@pytest.mark.parametrize("gpus", [[0, 0], pytest.param([0, 1], marks=two_gpus)])
def test_fabric_handles_share_memory(ranks: RunOnRanks, gpus: list[int]) -> None:
    [(said, _)] = on_gpus(ranks, 1, fabric_works)
    if said:
        pytest.skip(f"no FABRIC handles here: {said}")
    on_gpus(
        ranks,
        2,
        write_everywhere,
        gpus=gpus,
        segment_bytes=5 * MIB,
        only=FABRIC,
        dedicated=gpus != [0, 0],
    )


def promise_fabric(context: RankContext) -> tuple[list[str], int]:
    device = torch.device("cuda", 0)
    back_own_segment = _native.SegmentedMemory.back_own_segment

    def back(memory: _native.SegmentedMemory, form: _native.HandleForm) -> None:
        if form == FABRIC and context.rank == 1:
            raise RuntimeError("injected")
        back_own_segment(memory, form)

    with (
        group_of(context) as comm,
        mock.patch.object(_native, "reason_against", return_value=""),
        mock.patch.object(_native.SegmentedMemory, "back_own_segment", back),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("default")
        warm_up(comm, device, 64 * MIB)
        before = free_bytes(comm, device)
        memory = SymmetricMemory.allocate(comm, 64 * MIB, device)
        check_that_all_write_everywhere(comm, memory)
        memory.close()
        leaked = before - free_bytes(comm, device)
    return [str(warning.message) for warning in caught], leaked


def test_fabric_handles_that_were_promised_and_fail_are_replaced(ranks: RunOnRanks) -> None:
    for messages, leaked in on_gpus(ranks, 2, promise_fabric):
        assert len(messages) == 1, messages
        assert "file descriptors are used instead" in messages[0]
        assert leaked < 64 * MIB


def overrun(context: RankContext) -> list[int]:
    """Rank 0 writes behind its segment; nothing of it reaches rank 1's."""
    device = torch.device("cuda", 0)
    with group_of(context) as comm:
        memory = SymmetricMemory.allocate(comm, 2 * MIB, device)
        workspace = memory.workspace
        settle(comm, device)
        if context.rank == 0:
            behind = workspace.as_strided((16,), (1,), memory.mapped_bytes)
            behind.fill_(1)
            with pytest.raises(RuntimeError, match="illegal memory access"):
                torch.cuda.synchronize()
            comm.barrier()
            memory.close()
            return []
        comm.barrier()
        return workspace.amax(dim=1).tolist()


def test_overrun_faults_instead_of_reaching_a_peer(ranks: RunOnRanks) -> None:
    outcomes: list[Outcome] = ranks(2, overrun, dedicated=True, seconds=90)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [outcome.value for outcome in outcomes] == [[], [0, 0]]
