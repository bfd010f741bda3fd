"""Where can the contract suite run on this machine, and do the ranks get the GPUs they should?"""

from __future__ import annotations

import os

import pytest
import torch

from moe_ep import MoEEpCommParams
from tests.backends import ALL, Backend, reason_against
from tests.conftest import RunOnRanks
from tests.gpu_cases import GPUS
from tests.ranks import RankContext
from tests.ranks.devices import NCCL, ONE_GPU, gpu_of, share_of, unavailable_reason
from tests.rounds import check_all, play, random_round


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "device"),
    [(backend, device) for backend in ALL for device in backend.devices if device in GPUS],
    ids=str,
)
def test_a_round_is_exact(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    """Where this is skipped, the contract suite has no tests for the pair."""
    reason = reason_against(backend, device)
    if reason is not None:
        pytest.skip(reason)
    params = MoEEpCommParams(10, 4, 33, 100)
    rounds = [random_round(params, (33, 7), seed) for seed in range(3)]
    played = ranks(2, play, device=device, backend=backend.name, params=params, rounds=rounds)
    check_all(params, rounds, played)


def where_am_i(context: RankContext) -> tuple[str, int, str, int]:
    """Body: this rank's device and process, its share of the GPU and what CUDA made of it."""
    properties = torch.cuda.get_device_properties(context.device)
    share = os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
    return context.device, os.getpid(), share, properties.multi_processor_count


@pytest.mark.gpu
@pytest.mark.skipif(
    unavailable_reason(ONE_GPU) is not None, reason=str(unavailable_reason(ONE_GPU))
)
@pytest.mark.parametrize("size", [2, 8])
def test_ranks_of_one_gpu_are_processes_with_a_part_of_it_each(
    ranks: RunOnRanks, size: int
) -> None:
    pooled = ranks(size, where_am_i, device=ONE_GPU)
    outcomes = ranks(size, where_am_i, device=ONE_GPU, dedicated=True, seconds=90)
    assert [outcome.error for outcome in outcomes] == [None] * size
    everyone = pooled + [outcome.value for outcome in outcomes]
    assert {device for device, *_ in everyone} == {"cuda:0"}
    assert len({pid for _, pid, *_ in everyone}) == 2 * size
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    for _, _, share, multiprocessors in everyone:
        assert multiprocessors <= whole * float(share) / 100 + 2  # to what the hardware can divide


@pytest.mark.parametrize(
    ("device", "size", "gpus", "wanted"),
    [
        ("cpu", 2, 0, [None, None]),
        ("cuda", 4, 2, [0, 0, 0, 0]),
        ("cuda:spread", 2, 2, [0, 1]),
        ("cuda:spread", 4, 2, [0, 0, 1, 1]),
        ("cuda:spread", 3, 2, [0, 0, 1]),
        ("cuda:nccl", 2, 4, [0, 1]),
    ],
)
def test_neighbours_share_a_gpu(
    device: str, size: int, gpus: int, wanted: list[int | None]
) -> None:
    assert [gpu_of(device, rank, size, gpus) for rank in range(size)] == wanted


@pytest.mark.parametrize(
    ("device", "size", "percentages"),
    [
        ("cuda", 4, ["25"] * 4),
        ("cuda", 8, ["12.5"] * 8),
        ("cuda:spread", 2, ["100"] * 2),
        ("cuda:spread", 3, ["50", "50", "100"]),
        ("cuda:nccl", 2, ["100"] * 2),
    ],
)
def test_ranks_of_a_gpu_share_all_of_it(device: str, size: int, percentages: list[str]) -> None:
    shares = [share_of(device, rank, size, gpus=2) for rank in range(size)]
    assert [share["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for share in shares] == percentages


def test_ranks_on_the_cpu_need_no_share() -> None:
    assert share_of("cpu", 0, 2, gpus=2) == {}


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(KeyError, match="gpu"):
        gpu_of("gpu", 0, 2, gpus=2)


def test_nccl_needs_a_gpu_for_each_rank(ranks: RunOnRanks) -> None:
    too_many = torch.cuda.device_count() + 1
    assert ranks.max_size_on(NCCL) < too_many
    with pytest.raises(pytest.skip.Exception, match=f"needs {too_many} CUDA devices"):
        ranks(too_many, where_am_i, device=NCCL)
