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
from tests.gpu.device_rounds import capturing
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


def try_to_capture(
    context: RankContext, rounds: list[Round]
) -> tuple[Problem | None, list[Played]]:
    """Body: a round, a capture of its dispatch, which must fail, and another round."""
    params = MoEEpCommParams(11, 4, 40, 200)
    with create_communication(context.bootstrap(), params, "torch_dist") as communication:
        assert not communication.supports_cuda_graph
        played = [play_round(communication, rounds[0])]
        rows = rounds[0].hidden_states[context.rank].to(communication.device)
        ids = rounds[0].topk_ids[context.rank].to(communication.device)
        # NCCL's watchdog asks for its events meanwhile, from its own thread.
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, communication.device, capture_error_mode="thread_local"):
            rows.add_(0)  # a graph with nothing in it is warned of
            problem = problem_of(communication.dispatch, rows, ids)
        return problem, [*played, play_round(communication, rounds[1])]


@two_gpus
def test_a_round_over_nccl_says_that_it_cannot_be_captured(ranks: RunOnRanks) -> None:
    """The host takes part in it: it must know the counts to tell NCCL."""
    params = MoEEpCommParams(11, 4, 40, 200)
    rounds = [random_round(params, n, seed) for seed, n in enumerate([(40, 17), (0, 3)])]
    results = ranks(2, try_to_capture, device=NCCL, rounds=rounds)
    for problem, _ in results:
        expect(problem, MoEEpStateError, ["torch_dist", "CUDA graph", "supports_cuda_graph"])
    check_all(params, rounds, [played for _, played in results])
