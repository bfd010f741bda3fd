"""Is a round refused in a capture that would not record it?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_ep import MoEEpCommParams, MoEEpStateError
from tests.backends import Backend, on_each
from tests.conftest import RunOnRanks
from tests.gpu.device_rounds import Verdict, capturing, expected_sums, partial_rows, tokens_of
from tests.problems import Problem, expect, problem_of
from tests.ranks import RankContext
from tests.ranks.devices import SPREAD
from tests.rounds import create

pytestmark = pytest.mark.multirank
TOKENS = 8
PARAMS = MoEEpCommParams(24, 4, TOKENS, 1000)


def capture_on_another_gpu(context: RankContext, backend: str) -> list[Problem | None]:
    """Body: capture both calls of a round on a stream of another GPU, then as one should."""
    with create(context, PARAMS, backend) as communication:
        here = communication.device
        assert here.index is not None
        other = torch.device("cuda", 1 - here.index)
        tokens = tokens_of(PARAMS, 0, context.rank, TOKENS, here)
        elsewhere = torch.zeros(1, device=other)

        def try_to_capture(call: Callable[..., object], *arguments: Tensor) -> Problem | None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(other), capturing(graph, other):
                elsewhere.add_(0)  # a graph with nothing in it is warned of
                return problem_of(call, *arguments)

        problems = [try_to_capture(communication.dispatch, tokens.hidden_states, tokens.topk_ids)]
        result = communication.dispatch(tokens.hidden_states, tokens.topk_ids)
        partial = partial_rows(PARAMS, context.size, context.rank, result)
        problems.append(try_to_capture(communication.combine, partial))
        combined = communication.combine(partial)
        wanted = expected_sums(PARAMS, context.size, tokens, with_weights=False)
        verdict = Verdict(PARAMS, context.size, context.rank, 1, here)
        verdict.judge_sums(0, combined, wanted)
        communication.check()
        verdict.require()
        return problems


@on_each(having="workspace", devices=(SPREAD,))
def test_a_capture_on_another_gpu_raises_and_changes_nothing(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    """It would have run the round at once, and recorded nothing of it."""
    for problems in ranks(2, capture_on_another_gpu, device=device, backend=backend.name):
        for problem in problems:
            expect(problem, MoEEpStateError, ["captured", "cuda:0", "cuda:1"])
