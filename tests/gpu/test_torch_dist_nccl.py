"""Does torch_dist over NCCL give the oracle's bits? One rank a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moe_ep import BootstrapConfig, MoEEpCommParams, QuantFormat
from tests.conftest import RunOnRanks
from tests.ranks import Outcome, RankContext
from tests.rounds import Played, Round, check_all, play_round, random_round

pytestmark = pytest.mark.gpu

# NCCL refuses two ranks on one GPU.
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"needs two CUDA devices, found {torch.cuda.device_count()}",
)


def play_on_gpus(
    context: RankContext, params: MoEEpCommParams, rounds: list[Round], groups: str
) -> list[Played]:
    """Body: as tests.rounds.play, in a group of GPUs that this process joins itself."""
    from moe_ep import create_communication

    torch.cuda.set_device(context.rank)
    dist.init_process_group(groups, device_id=torch.device("cuda", context.rank))
    try:
        bootstrap = BootstrapConfig(
            context.size, context.rank, process_group=dist.group.WORLD, device=context.rank
        )
        with create_communication(bootstrap, params, "torch_dist") as communication:
            assert communication.device.type == "cuda"
            return [play_round(communication, one) for one in rounds]
    finally:
        dist.destroy_process_group()


@two_gpus
@pytest.mark.parametrize("groups", ["nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize(
    ("dtype", "dispatch_format"),
    [(torch.bfloat16, None), (torch.float32, None), (torch.float16, QuantFormat.MXFP8)],
)
def test_rounds_over_nccl_equal_the_oracle(
    ranks: RunOnRanks, groups: str, dtype: torch.dtype, dispatch_format: QuantFormat | None
) -> None:
    params = MoEEpCommParams(11, 4, 40, 200, dtype=dtype, dispatch_format=dispatch_format)
    sizes = [(40, 17), (0, 3), (5, 0), (0, 0), (31, 40)]
    rounds = [random_round(params, n, seed) for seed, n in enumerate(sizes)]
    outcomes: list[Outcome] = ranks(
        2,
        play_on_gpus,
        params=params,
        rounds=rounds,
        groups=groups,
        dedicated=True,
        seconds=100,
    )
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
    check_all(params, rounds, [outcome.value for outcome in outcomes])
