"""Are ranks that have more of a GPU together than there is warned, and only these?"""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from moe_ep import BootstrapConfig, MoEEpCommParams, create_communication
from moe_ep.shared_gpus import GpuShare, multiprocessors_of
from tests.conftest import RunOnRanks
from tests.ranks import RankContext
from tests.ranks.devices import ONE_GPU, unavailable_reason

BACKEND = "nvlink_one_sided"  # what every GPU can run

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.gpu,
    pytest.mark.skipif(
        unavailable_reason(ONE_GPU) is not None, reason=str(unavailable_reason(ONE_GPU))
    ),
]


def create_twice(bootstrap: BootstrapConfig) -> tuple[GpuShare | None, int | None, list[str]]:
    """Return this process's share, the multiprocessors of its GPU, and what it is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            create_communication(bootstrap, MoEEpCommParams(4, 2, 8, 64), BACKEND).destroy()
    share = GpuShare.of(torch.device("cuda", 0))
    assert share is not None
    texts = [str(one.message) for one in caught if one.category is RuntimeWarning]
    return share, multiprocessors_of(share.uuid), texts


def create_with_a_share(context: RankContext) -> tuple[GpuShare | None, int | None, list[str]]:
    """Body: as the environment of the ranks has it."""
    return create_twice(context.bootstrap())


def create_with_all(context: RankContext) -> tuple[GpuShare | None, int | None, list[str]]:
    """Body: no rank is limited, beside a daemon or not. No round is played."""
    os.environ.pop("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", None)
    return create_twice(BootstrapConfig(context.size, context.rank, device=0))


def whole_gpu() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.parametrize("size", [2, 8])
def test_equal_shares_are_not_warned_of(ranks: RunOnRanks, size: int) -> None:
    for share, whole, texts in ranks(size, create_with_a_share, device=ONE_GPU):
        assert share.multiprocessors < whole == whole_gpu()
        assert texts == []


def test_ranks_that_have_all_of_one_gpu_each_are_warned_once(ranks: RunOnRanks) -> None:
    outcomes = ranks(2, create_with_all, dedicated=True, seconds=90)
    assert [outcome.error for outcome in outcomes] == [None, None]
    for share, whole, texts in (outcome.value for outcome in outcomes):
        assert share.multiprocessors == whole == whole_gpu()
        (text,) = texts
        for part in (share.uuid, f"ranks 0, 1: {whole}.", "PERCENTAGE=50 "):
            assert part in text, text
