"""Do tokens that all ranks hold get the same sums in place as where a slice of them travels?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import (
    MoEEpAbandonedError,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpDisagreementError,
    MoEEpInputError,
    MoEEpStateError,
    create_communication,
)
from tests.bits import assert_same_bits
from tests.conftest import RunOnRanks
from tests.problems import expect, problem_of
from tests.ranks import RankContext

pytest.importorskip("transformers", "5.17")

from moe_ep.integrations.transformers import exchange
from moe_ep.integrations.transformers.shared_batch import run_in_place

pytestmark = pytest.mark.multirank
SIZE = 3
PARAMS = MoEEpCommParams(7, 4, 8, 24, dtype=torch.bfloat16)  # the last ranks own fewer experts


def inputs_of(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, PARAMS.num_experts, (tokens, PARAMS.top_k), generator=g)
    ids[1:2] = -1  # goes nowhere
    ids[2:3] = 0  # to one rank
    x = torch.randn(tokens, PARAMS.hidden_size, generator=g).bfloat16()
    return x, ids, torch.randn(tokens, PARAMS.top_k, generator=g).bfloat16()


def experts_of(communication: MoEEpCommunication) -> exchange.Experts:
    """Experts of which each multiplies by another number."""
    first = communication.first_local_expert

    def experts(rows: Tensor, local_ids: Tensor, ones: Tensor) -> Tensor:
        return (rows * (1.1 + first + local_ids)).to(rows.dtype)

    return experts


def play(context: RankContext, backend: str, sizes: list[int]) -> dict[str, Any]:
    """Body: for each number of tokens the sums in place, and those of tokens that travel."""
    with torch.no_grad(), create_communication(context.bootstrap(), PARAMS, backend) as of:
        experts, got = experts_of(of), {}
        for tokens in sizes:
            given = inputs_of(tokens)
            in_place = run_in_place(of, *given, experts)
            one = exchange.dispatch(of, *given, None)
            travelled = exchange.combine(one, exchange.run_experts(one, experts, asks_host=True))
            got[tokens] = (in_place, travelled)
        with torch.enable_grad():
            got["with gradients"] = run_in_place(of, *inputs_of(2), experts)
        return got


def test_sums_in_place_are_those_of_tokens_that_travel(ranks: RunOnRanks) -> None:
    sizes = [8, 0, 1, 7, 8]
    for rank, got in enumerate(ranks(SIZE, play, backend="cake", sizes=sizes)):
        for tokens in sizes:
            in_place, travelled = got[tokens]
            assert_same_bits(in_place, travelled, rank=rank, what=f"{tokens} tokens")
        assert got["with gradients"] is None


def test_ranks_that_cannot_read_each_others_memory_are_told_to_send(ranks: RunOnRanks) -> None:
    for got in ranks(SIZE, play, backend="nvlink_two_sided", sizes=[3]):
        assert got[3][0] is None


def play_oddly(context: RankContext) -> list[Any]:
    """Body: sums of the same batch, given in other ways."""
    with torch.no_grad(), create_communication(context.bootstrap(), PARAMS, "cake") as of:
        x, ids, weights = inputs_of(7)
        how: dict[str, Any] = {"experts": experts_of(of)}
        in_another_dtype = {**how, "experts": lambda *given: how["experts"](*given).float()}
        far = torch.where(ids < 0, 3 - 2**32, ids)  # padding whose low half is an expert's id
        return [
            run_in_place(of, x, ids, weights, **how),
            run_in_place(of, x.t().contiguous().t(), ids, weights, **how),
            run_in_place(of, x, far, weights, **how),
            run_in_place(of, x, ids, weights, **in_another_dtype),
        ]


def test_sums_in_place_are_the_same_however_the_batch_is_given(ranks: RunOnRanks) -> None:
    for rank, got in enumerate(ranks(SIZE, play_oddly)):
        for sums in got[1:]:
            assert_same_bits(sums, got[0], rank=rank)


def leave_alone(context: RankContext) -> list[Any]:
    """Body: what there is of a batch that is too large, and what one raises after destroy."""
    with torch.no_grad(), create_communication(context.bootstrap(), PARAMS, "cake") as of:
        how: dict[str, Any] = {"experts": experts_of(of)}
        too_many = SIZE * PARAMS.max_tokens_per_rank + 1
        large = run_in_place(of, *inputs_of(too_many), **how)
        of.destroy()
        return [large, problem_of(run_in_place, of, *inputs_of(2), **how)]


def test_what_dispatch_refuses_is_left_to_it_or_refused_alike(ranks: RunOnRanks) -> None:
    for large, destroyed in ranks(SIZE, leave_alone):
        assert large is None
        expect(destroyed, MoEEpStateError, ["dispatch after destroy"])


def refuse(context: RankContext) -> list[Any]:
    """Body: what an id of no expert raises, and the sums of a round after it."""
    with torch.no_grad(), create_communication(context.bootstrap(), PARAMS, "cake") as of:
        x, ids, weights = inputs_of(5)
        wrong = ids.clone()
        wrong[3, 0] = PARAMS.num_experts
        how: dict[str, Any] = {"experts": experts_of(of)}
        problem = problem_of(run_in_place, of, x, wrong, weights, **how)
        return [problem, run_in_place(of, x, ids, weights, **how)]


def test_an_id_of_no_expert_is_refused_on_all_ranks(ranks: RunOnRanks) -> None:
    for got in ranks(SIZE, refuse):
        problem, sums = got
        expect(problem, MoEEpInputError, ["topk_ids must be below num_experts=7", "got 7"])
        assert sums.shape == (5, PARAMS.hidden_size)


def differ(context: RankContext) -> list[Any]:
    """Body: what batches raise that are not the same, and the sums of a round after each."""
    with torch.no_grad(), create_communication(context.bootstrap(), PARAMS, "cake") as of:
        x, ids, weights = inputs_of(7)
        how: dict[str, Any] = {"experts": experts_of(of)}
        other = ids.clone()
        other[6, 3] = 5 - other[6, 3]
        odd = context.rank == 1
        got: list[Any] = []
        of_no_expert = ids.clone()
        of_no_expert[0, 0] = PARAMS.num_experts
        batches = [(x, other, weights), (x[:6], ids[:6], weights[:6]), (x, of_no_expert, weights)]
        for given in batches:
            mine = given if odd else (x, ids, weights)
            got += [problem_of(run_in_place, of, *mine, **how)]
            got += [run_in_place(of, x, ids.int(), weights, **how)]
        # A layer where they share a batch, and one where each has its own.
        call = exchange.dispatch if odd else run_in_place
        last = (None,) if odd else (how["experts"],)
        got += [problem_of(call, of, x, ids, weights, *last)]
        got += [run_in_place(of, x, ids, weights, **how)]
        return got


def test_batches_that_are_not_the_same_are_an_error_on_all_ranks(ranks: RunOnRanks) -> None:
    for rank, got in enumerate(ranks(SIZE, differ)):
        other_ids, first, fewer, second, of_no_expert, third, mixed, fourth = got
        words = ["rank 0: a batch of all ranks, 7 tokens", "rank 1: a batch of all ranks, "]
        expect(other_ids, MoEEpDisagreementError, ["the same batch (tp_size)", *words])
        expect(fewer, MoEEpDisagreementError, [*words, "ranks, 6 tokens", "num_experts=7"])
        expect(of_no_expert, MoEEpDisagreementError, [*words, "ranks, 7 tokens"])
        words = ["rank 0: a batch of all ranks, 7 tokens", "rank 1: tokens_per_rank=8"]
        expect(mixed, MoEEpDisagreementError, words)
        for sums in (second, third, fourth):
            assert_same_bits(sums, first, rank=rank)


def raise_in_one(context: RankContext) -> list[Any]:
    """Body: what there is where one rank's experts raise, and the sums of a round after that."""
    with torch.no_grad(), create_communication(context.bootstrap(), PARAMS, "cake") as of:
        experts = experts_of(of)

        def raising(*given: Tensor) -> Tensor:
            if context.rank == 1:
                raise ArithmeticError("too much")
            return experts(*given)

        problem = problem_of(run_in_place, of, *inputs_of(7), raising)
        return [problem, run_in_place(of, *inputs_of(7), experts)]


def test_experts_that_raise_are_heard_of_on_all_ranks(ranks: RunOnRanks) -> None:
    got = ranks(SIZE, raise_in_one)
    for rank, (problem, sums) in enumerate(got):
        if rank == 1:
            expect(problem, ArithmeticError, ["too much"])
        else:
            expect(problem, MoEEpAbandonedError, ["raised on rank(s) 1,"])
        assert_same_bits(sums, got[0][1], rank=rank)
