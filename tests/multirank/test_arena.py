"""Do layers of different geometry take turns in one workspace, as if each had its own?"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ep import (
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpConfigError,
    MoEEpDisagreementError,
    MoEEpStateError,
    QuantFormat,
    estimate_workspace_bytes,
)
from tests.backends import Backend, every_backend, on_each
from tests.conftest import RunOnRanks
from tests.multirank.test_checkpoint import place_of_rows, shared_mappings
from tests.problems import Problem, expect, problem_of
from tests.ranks import RankContext
from tests.ranks.devices import CPU
from tests.rounds import Played, Round, check, create, play_round, random_round

pytestmark = pytest.mark.multirank
FP8 = MoEEpCommParams(10, 8, 6, 128, dispatch_format=QuantFormat.DeepSeekFp8)
BF16 = MoEEpCommParams(7, 2, 8, 256)
FLOAT = MoEEpCommParams(12, 3, 9, 20, torch.float32)
ARENA = (FP8, BF16, FLOAT)
# The narrow after the wide and the wide after the narrow, each twice in a row, too.
ORDER = (FP8, BF16, FP8, FP8, FLOAT, BF16, FLOAT, FLOAT, FP8)
with_memory = on_each(having="workspace")
in_place = on_each(having="zero_copy")


def rounds_in(order: Sequence[MoEEpCommParams], ranks: int = 3) -> list[Round]:
    """Return a round for each of these layers, of different numbers of tokens."""
    return [
        random_round(
            params,
            [(seed * 5 + rank * 3) % (params.max_tokens_per_rank + 1) for rank in range(ranks)],
            seed,
        )
        for seed, params in enumerate(order)
    ]


def layers_of(
    context: RankContext,
    backend: str,
    arena: Sequence[MoEEpCommParams] = ARENA,
    **options: Any,
) -> dict[MoEEpCommParams, MoEEpCommunication]:
    return {
        params: create(context, params, backend, arena=tuple(arena), **options) for params in arena
    }


def check_in_turns(
    order: Sequence[MoEEpCommParams], rounds: Sequence[Round], played: Sequence[Sequence[Played]]
) -> None:
    """Compare each round with the oracle of its layer."""
    for index, (params, one) in enumerate(zip(order, rounds, strict=True)):
        check(params, one, [of_rank[index] for of_rank in played])


def take_turns(context: RankContext, backend: str, rounds: Sequence[Round]) -> list[Played]:
    """Body: a layer a round, in an arena."""
    gc.collect()
    before = shared_mappings()
    layers = layers_of(context, backend)
    if context.device == CPU:
        assert shared_mappings() - before in (0, context.size)
    sizes = {layer.workspace_bytes for layer in layers.values()}
    assert len(sizes) == 1
    played = [play_round(layers[params], one) for params, one in zip(ORDER, rounds, strict=True)]
    for layer in layers.values():
        layer.destroy()
    assert shared_mappings() == before
    return played


@every_backend
def test_layers_of_an_arena_take_turns_and_get_what_they_would_get_alone(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    rounds = rounds_in(ORDER)
    played = ranks(3, take_turns, device=device, backend=backend.name, rounds=rounds)
    check_in_turns(ORDER, rounds, played)


def sizes_in_an_arena(context: RankContext, backend: Backend) -> tuple[int, int, list[int]]:
    """Body: return what an arena holds, its estimate, and what its layers take alone."""
    config = backend.communication.config_type
    alone = []
    for params in ARENA:
        with create(context, params, backend.name) as layer:
            alone.append(layer.workspace_bytes)
    layers = layers_of(context, backend.name)
    held = layers[BF16].workspace_bytes
    estimated = estimate_workspace_bytes(
        FLOAT, context.size, config(arena=ARENA), device=context.device
    )
    for layer in layers.values():
        layer.destroy()
    return held, estimated, alone


@with_memory
def test_an_arena_is_estimated_exactly_and_takes_less_than_its_layers_apart(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for held, estimated, alone in ranks(2, sizes_in_an_arena, device=device, backend=backend):
        assert held == estimated
        assert max(alone) <= held < sum(alone)


def take_turns_with_masks_and_checkpoints(
    context: RankContext, backend: str, rounds: Sequence[Round]
) -> list[Played | None]:
    """Body: between the rounds one layer gives the memory back and another has it again, or all
    begin anew; a rank that is masked off sits its round out.
    """
    layers = layers_of(context, backend, enable_rank_mask=True)
    played: list[Played | None] = []
    for index, (params, one) in enumerate(zip(ORDER, rounds, strict=True)):
        active = one.active_ranks is None or context.rank in one.active_ranks
        played.append(play_round(layers[params], one) if active else None)
        context.barrier()
        if index % 3 == 1:
            layers[FP8].checkpoint_prepare()
            layers[BF16].checkpoint_restore()
        elif one.active_ranks is not None:
            layers[FLOAT].reinitialize()
    for layer in layers.values():
        layer.destroy()
    return played


@on_each(having="masks")
def test_masks_checkpoints_and_new_beginnings_are_those_of_all_layers(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    rounds = [
        replace(one, active_ranks=[0, 2]) if index % 4 == 2 else one
        for index, one in enumerate(rounds_in(ORDER))
    ]
    played = ranks(
        3,
        take_turns_with_masks_and_checkpoints,
        device=device,
        backend=backend.name,
        rounds=rounds,
    )
    for index, (params, one) in enumerate(zip(ORDER, rounds, strict=True)):
        check(params, one, [of_rank[index] for of_rank in played])


def call_different_layers(
    context: RankContext, backend: str, rounds: Sequence[Round]
) -> tuple[Problem | None, list[Played]]:
    """Body: rank 1 calls another layer than the others, of rows as wide; then all call both."""
    layers = layers_of(context, backend, ALIKE)
    mine = layers[ALIKE[context.rank == 1]]
    said = problem_of(play_round, mine, rounds[context.rank == 1])
    played = [play_round(layers[ALIKE[0]], rounds[0]), play_round(layers[ALIKE[1]], rounds[1])]
    for layer in layers.values():
        layer.destroy()
    return said, played


ALIKE = (MoEEpCommParams(8, 2, 8, 64), MoEEpCommParams(6, 2, 8, 64))


@with_memory
def test_ranks_that_call_different_layers_all_learn_of_it(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    rounds = rounds_in(ALIKE)
    results = ranks(3, call_different_layers, device=device, backend=backend.name, rounds=rounds)
    for said, _ in results:
        expect(
            said,
            MoEEpDisagreementError,
            ["rank 0: ", "num_experts=8", "rank 1: ", "num_experts=6", "same layer"],
        )
    check_in_turns(ALIKE, rounds, [played for _, played in results])


def open_two_rounds(context: RankContext, backend: str, one: Round) -> Problem | None:
    layers = layers_of(context, backend)
    rank = context.rank
    result = layers[BF16].dispatch(
        one.hidden_states[rank].to(layers[BF16].device),
        one.topk_ids[rank].to(layers[BF16].device),
    )
    said = problem_of(place_of_rows, layers[FLOAT])
    layers[BF16].combine(torch.zeros_like(result.hidden_states))
    for layer in layers.values():
        layer.destroy()
    return said


@with_memory
def test_a_layer_waits_for_the_round_of_another_to_end(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    [one] = rounds_in([BF16])
    for said in ranks(3, open_two_rounds, device=device, backend=backend.name, one=one):
        expect(said, MoEEpStateError, ["while a round is open on another communication"])


def share_or_not(context: RankContext, backend: str) -> None:
    """Body: the order of an arena says nothing; another arena, or none, is another workspace."""
    one = create(context, BF16, backend, arena=ARENA)
    other_order = create(context, FLOAT, backend, arena=ARENA[::-1])
    smaller = create(context, BF16, backend, arena=(BF16, FP8))
    alone = create(context, BF16, backend)
    assert place_of_rows(one)[0] == place_of_rows(other_order)[0]
    assert len({place_of_rows(each)[0] for each in (one, smaller, alone)}) == 3
    for each in (one, other_order, smaller, alone):
        each.destroy()


@in_place
def test_who_names_the_same_layers_shares(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    ranks(2, share_or_not, device=device, backend=backend.name)


def leave_itself_out(context: RankContext, backend: str) -> Problem | None:
    return problem_of(create, context, FP8, backend, arena=(BF16, FLOAT))


@every_backend
def test_a_layer_that_its_arena_does_not_name_is_an_error_on_all(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for said in ranks(2, leave_itself_out, device=device, backend=backend.name):
        expect(said, MoEEpConfigError, ["arena must name", "params"])
