"""Do rank masks and statistics of the experts go through a compiled round as through an eager one?

Values are small integers and weights powers of two: whatever Inductor fuses, the result is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from moe_ep import MoEEpCommParams, MoEEpCommunication, MoEEpDispatchResult
from moe_ep.cake.kernels import active_rank_mask
from tests.backends import named
from tests.bits import assert_same_bits
from tests.conftest import RunOnRanks
from tests.ranks import RankContext
from tests.rounds import Played, Round, check, copy_of, create
from tests.rounds.layers import random_inputs, small_integers

pytestmark = pytest.mark.multirank
SIZE, NUM_STATS = 3, 5
PARAMS = MoEEpCommParams(7, 2, 8, 16, dtype=torch.float32)
Model = Callable[..., tuple[MoEEpDispatchResult, Tensor]]


def round_of(communication: MoEEpCommunication) -> Model:
    """One with the experts of `moe_ep.reference.scale_by_number`."""
    first = communication.first_local_expert
    end = first + communication.num_local_experts

    def experts(got: MoEEpDispatchResult) -> Tensor:
        assert got.topk_weights is not None
        is_local = (got.topk_ids >= first) & (got.topk_ids < end)
        factors = torch.where(is_local, got.topk_weights * (got.topk_ids + 1), 0)
        return got.hidden_states * factors.sum(1, keepdim=True)

    def model(x: Tensor, ids: Tensor, weights: Tensor, stats: Tensor, mask: Tensor | None) -> Any:
        masks = {} if mask is None else {"active_rank_mask": mask}
        got = communication.dispatch(x, ids, weights, eplb_local_stats=stats, **masks)
        return got, communication.combine(experts(got), **masks)

    return model


def play_and_compile(
    context: RankContext, backend: str, rounds: Sequence[Round], trains: bool
) -> tuple[list[Played], int]:
    """Body: play the rounds compiled, until this rank is masked off, and compare gradients with
    those of eager rounds. Return what came, and how many graphs there are. Nobody may be masked off
    who has still to read what it got."""
    torch._dynamo.reset()
    counters.clear()
    options = {"enable_rank_mask": True} if named(backend).masks else {}
    played = []
    with create(
        context, PARAMS, backend, timeout_sec=100, eplb_stats_num_experts=NUM_STATS, **options
    ) as communication:
        model = round_of(communication)
        # Without gradients only Inductor leaves the workspace as it is.
        compiler = "aot_eager" if trains else "inductor"
        compiled: Model = torch.compile(model, fullgraph=True, backend=compiler)
        for one in rounds:
            context.barrier()
            if one.active_ranks is not None and context.rank not in one.active_ranks:
                continue
            mask = None if one.active_ranks is None else active_rank_mask(one.active_ranks, SIZE)
            with torch.set_grad_enabled(trains):
                got, combined, *grads = run(compiled, one, context.rank, mask, trains)
                played.append(replace(copy_of(got), combined=combined.detach()))
                if trains:
                    for name, ours, theirs in zip(
                        ("x", "w"),
                        grads,
                        run(model, one, context.rank, mask, trains)[2:],
                        strict=True,
                    ):
                        assert_same_bits(
                            ours, theirs, rank=context.rank, what=f"gradient of {name}"
                        )
    return played, counters["stats"]["unique_graphs"]


def run(model: Model, one: Round, rank: int, mask: Tensor | None, trains: bool) -> list[Any]:
    """Return what a dispatch brought, the sums, and the gradients of tokens and weights."""
    assert one.topk_weights is not None
    assert one.eplb_local_stats is not None
    x = one.hidden_states[rank].clone().requires_grad_(trains)
    weights = one.topk_weights[rank].clone().requires_grad_(trains)
    got, combined = model(x, one.topk_ids[rank], weights, one.eplb_local_stats[rank], mask)
    if not trains:
        return [got, combined]
    combined.backward(small_integers(combined.shape, 5))
    detached = replace(got, hidden_states=got.hidden_states.detach())
    return [detached, combined, x.grad, weights.grad]


def rounds_of(masks: Sequence[Sequence[int] | None]) -> list[Round]:
    """One for each mask; numbers of tokens differ between ranks and rounds."""
    rounds = []
    for index, active in enumerate(masks):
        inputs = [
            random_inputs(PARAMS, 3 + (index + 2 * rank) % 5, small_integers, 10 * index + rank)
            for rank in range(SIZE)
        ]
        xs, ids, weights = map(list, zip(*inputs, strict=True))
        stats = [small_integers((NUM_STATS,), 10 * index + rank).int() for rank in range(SIZE)]
        rounds.append(
            Round(
                hidden_states=xs,
                topk_ids=ids,
                topk_weights=weights,
                eplb_local_stats=stats,
                active_ranks=active,
            )
        )
    return rounds


def play_and_check(
    ranks: RunOnRanks, backend: str, masks: Sequence[Sequence[int] | None], *, trains: bool
) -> None:
    rounds = rounds_of(masks)
    how = {"backend": backend, "rounds": rounds, "trains": trains}
    results = ranks(SIZE, play_and_compile, **how)
    for index, one in enumerate(rounds):
        of_ranks = [played[index] if index < len(played) else None for played, _ in results]
        check(PARAMS, one, of_ranks)
    # The second is for any number of tokens; the mask is read when it runs.
    assert all(graphs <= 2 for _, graphs in results), results


EVERYONE, NOT_1, NOT_0_NOR_1 = (0, 1, 2), (0, 2), (2,)


@pytest.mark.parametrize("backend", ["cake", "nvlink_one_sided"])
def test_a_compiled_round_follows_the_mask(ranks: RunOnRanks, backend: str) -> None:
    masks = [EVERYONE, EVERYONE, NOT_1, NOT_1, NOT_0_NOR_1]
    play_and_check(ranks, backend, masks, trains=False)


def test_a_compiled_round_with_gradients_follows_the_mask(ranks: RunOnRanks) -> None:
    masks = [EVERYONE, EVERYONE, NOT_1, NOT_1, NOT_0_NOR_1]
    play_and_check(ranks, "cake", masks, trains=True)


@pytest.mark.parametrize("trains", [False, True])
def test_a_compiled_round_gathers_statistics(ranks: RunOnRanks, trains: bool) -> None:
    """On a backend that takes no mask."""
    play_and_check(ranks, "torch_dist", [None] * 3, trains=trains)
