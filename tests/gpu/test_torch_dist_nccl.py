"""Does torch_dist over NCCL give the oracle's bits, also in a group that has only NCCL? One rank a
GPU. (The contract suite runs over NCCL, too: it is the device "cuda:nccl" there.)
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpStateError,
    QuantFormat,
    create_communication,
)
from tests.conftest import RunOnRanks
from tests.gpu.device_rounds import capturing, partial_rows
from tests.gpu.recorded import Recorded, steps_of
from tests.problems import Problem, expect, problem_of
from tests.ranks import Outcome, RankContext
from tests.ranks.devices import NCCL, unavailable_reason
from tests.rounds import Played, Round, check_all, play_round, random_round

pytestmark = pytest.mark.gpu

two_gpus = pytest.mark.skipif(
    unavailable_reason(NCCL) is not None, reason=str(unavailable_reason(NCCL))
)


def play_on_gpus(
    context: RankContext, params: MoEEpCommParams, rounds: list[Round], groups: str
) -> list[Played]:
    """Body: as tests.rounds.play, in a group of GPUs that this process joins itself."""
    dist.init_process_group(groups, device_id=torch.device(context.device))
    try:
        bootstrap = BootstrapConfig(
            context.size, context.rank, process_group=dist.group.WORLD, device=context.device
        )
        with create_communication(bootstrap, params, "torch_dist") as communication:
            assert communication.device.type == "cuda"
            return [play_round(communication, one) for one in rounds]
    finally:
        dist.destroy_process_group()


@two_gpus
@pytest.mark.parametrize(
    ("groups", "dtype", "dispatch_format"),
    [
        ("nccl", torch.bfloat16, None),
        ("cpu:gloo,cuda:nccl", torch.float16, QuantFormat.MXFP8),
    ],
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
        device=NCCL,
        params=params,
        rounds=rounds,
        groups=groups,
        dedicated=True,
        seconds=100,
    )
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
    check_all(params, rounds, [outcome.value for outcome in outcomes])


CAPACITIES = (8, 3, 40)
REPLAYS = 3


def capture_rounds(context: RankContext) -> Problem | None:
    """Body: a capture that comes too early, which must fail; then rounds of several sizes eagerly,
    from a graph, and eagerly again.
    """
    params = MoEEpCommParams(11, 4, 40, 200)
    with create_communication(context.bootstrap(), params, "torch_dist") as communication:
        assert communication.supports_cuda_graph
        steps, verdict = steps_of(communication, CAPACITIES, 0)

        def play() -> None:
            for index, step in enumerate(steps):
                result = step.dispatch(communication)
                verdict.judge_received(index, result, step.received)
                partial = partial_rows(params, context.size, context.rank, result)
                verdict.judge_sums(index, communication.combine(partial), step.sums)

        problem = None
        if communication.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, communication.device, capture_error_mode="thread_local"):
                torch.zeros(1, device=communication.device)  # an empty graph is warned of
                problem = problem_of(play)
        play()
        recorded = Recorded(communication.device, play)
        for _ in range(REPLAYS):
            recorded.replay()
        play()
        communication.check()
        verdict.require()
        return problem


@two_gpus
def test_rounds_over_nccl_are_exact_in_a_cuda_graph(ranks: RunOnRanks) -> None:
    for problem in ranks(2, capture_rounds, device=NCCL, seconds=60):
        expect(problem, MoEEpStateError, ["eager round", "same sizes"])
