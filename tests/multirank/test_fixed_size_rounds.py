"""Is what torch_dist does in a CUDA graph exact? On the CPU, where nothing can be captured, it is
told that something is. (tests/gpu/test_torch_dist_nccl.py captures.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ep import (
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpInputError,
    MoEEpStateError,
    QuantFormat,
    TorchDistAlltoAll,
)
from tests.conftest import RunOnRanks
from tests.problems import Problem, expect, problem_of
from tests.ranks import RankContext
from tests.rounds import Played, Round, check_all, create, ids_of, play_round, random_round, rows_of

pytestmark = pytest.mark.multirank


class ValuesOfNoTensor(TorchDispatchMode):
    """Raises where the host would wait for a value or a size: a capture on CUDA forbids it."""

    LOOKS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item")

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(func).split(".")[1]
        assert name.removesuffix("_") not in self.LOOKS, f"{func} looks at a tensor's values"
        return func(*args, **(kwargs or {}))


class AsIfCaptured(TorchDistAlltoAll):
    """Within `capture`, the host takes part in nothing."""

    captures = False

    def _is_captured(self) -> bool:
        return self.captures


def as_if_captured(communication: MoEEpCommunication) -> AsIfCaptured:
    """Make it one, whose rounds without the host raise where they look at a tensor's values."""
    communication.__class__ = AsIfCaptured
    assert isinstance(communication, AsIfCaptured)
    for name in ("dispatch", "combine"):
        setattr(communication._captured, name, blind(getattr(communication._captured, name)))
    return communication


def blind(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        with ValuesOfNoTensor():
            return call(*args)

    return called


def play_in_fixed_blocks(
    context: RankContext,
    params: MoEEpCommParams,
    rounds: Sequence[Round],
    options: dict[str, Any] | None = None,
) -> list[Played]:
    """Body: each round eagerly, then without the host. Returns what came of the latter."""
    with create(context, params, "torch_dist", **(options or {})) as communication:
        communication = as_if_captured(communication)
        played = []
        for one in rounds:
            for communication.captures in (False, True):
                came = play_round(communication, one, give_output=communication.captures)
            played.append(came)
        communication.captures = False
        communication.check()
    return played


@pytest.mark.parametrize(
    ("size", "params"),
    [
        (1, MoEEpCommParams(3, 2, 9, 8)),
        (2, MoEEpCommParams(11, 4, 40, 201, torch.float16)),
        (3, MoEEpCommParams(10, 8, 40, 65, torch.float32)),
        (3, MoEEpCommParams(2, 1, 40, 1)),  # a rank without experts
        (2, MoEEpCommParams(9, 3, 40, 203, dispatch_format=QuantFormat.MXFP8)),
    ],
    ids=str,
)
def test_rounds_in_fixed_blocks_equal_the_oracle(
    ranks: RunOnRanks, size: int, params: MoEEpCommParams
) -> None:
    most = params.max_tokens_per_rank
    counts = [(most, 0, 5), (0, 0, 0), (1, most, 0), (3, 7, 2)]
    rounds = [random_round(params, one[:size], seed) for seed, one in enumerate(counts)]
    check_all(params, rounds, ranks(size, play_in_fixed_blocks, params=params, rounds=rounds))


def test_statistics_travel_in_fixed_blocks(ranks: RunOnRanks) -> None:
    params = MoEEpCommParams(11, 4, 40, 16)
    stats = [torch.arange(7, dtype=torch.int32) + 10 * rank for rank in range(2)]
    first = replace(random_round(params, (3, 2), 0), eplb_local_stats=stats)
    rounds = [first, random_round(params, (0, 1), 1)]
    options = {"eplb_stats_num_experts": 7}
    played = ranks(2, play_in_fixed_blocks, params=params, rounds=rounds, options=options)
    check_all(params, rounds, played)


def capture_what_was_not_played(context: RankContext) -> list[Problem | None]:
    """Body: rounds without the host that no eager round was like."""
    params = MoEEpCommParams(4, 2, 8, 16)
    rows, ids = torch.ones(2, 16).bfloat16(), ids_of([[0, 3], [1, 2]], 2)
    with create(context, params, "torch_dist") as communication:
        communication = as_if_captured(communication)
        communication.combine(communication.dispatch(rows, ids).hidden_states)
        communication.captures = True
        weights = torch.ones(2, 2)
        problems = [
            problem_of(communication.dispatch, rows, ids, weights),
            problem_of(communication.dispatch, rows, ids, runtime_max_tokens_per_rank=3),
        ]
        sums = communication.combine(communication.dispatch(rows, ids).hidden_states)
        assert torch.equal(sums, 2 * rows)
        return problems


def test_only_what_the_ranks_have_agreed_on_may_be_captured(ranks: RunOnRanks) -> None:
    for problems in ranks(2, capture_what_was_not_played):
        for problem in problems:
            expect(problem, MoEEpStateError, ["eager round", "same sizes"])


def pass_wrong_ids(context: RankContext) -> list[Problem | None]:
    """Body: wrong ids in two rounds without the host, one look, and another one."""
    params = MoEEpCommParams(4, 2, 8, 16)
    rows = rows_of([1, 2], 16)
    with create(context, params, "torch_dist") as communication:
        communication = as_if_captured(communication)
        good = ids_of([[0, 3], [1, 2]], 2)
        communication.combine(communication.dispatch(rows, good).hidden_states)
        communication.captures = True
        for ids in (good, ids_of([[0, -1], [1, 9]], 2), ids_of([[5, 6], [1, 2]], 2)):
            result = communication.dispatch(rows, ids)
            communication.combine(result.hidden_states)
        communication.captures = False
        return [problem_of(communication.check), problem_of(communication.check)]


def test_wrong_ids_of_captured_rounds_are_counted_and_raised_once(ranks: RunOnRanks) -> None:
    for rank, (first, second) in enumerate(ranks(2, pass_wrong_ids)):
        expect(first, MoEEpInputError, [f"rank {rank} passed 3 expert id(s)", "token 1, slot 1: 9"])
        assert second is None
