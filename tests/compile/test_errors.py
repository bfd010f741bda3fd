"""Do compiled layers raise the errors of the library, and go on where eager ones do?"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from moe_ep import (
    MoEEpAbandonedError,
    MoEEpCommParams,
    MoEEpDisagreementError,
    MoEEpInputError,
    MoEEpLayer,
    MoEEpStateError,
    MoEEpTimeoutError,
)
from tests.backends import ALL
from tests.conftest import RunOnRanks
from tests.problems import expect, problem_of
from tests.ranks import RankContext
from tests.ranks.waiting import introduce, outlive
from tests.rounds import create
from tests.rounds.layers import random_inputs, small_integers

PARAMS = MoEEpCommParams(4, 2, 8, 16)
BUDGET = 60  # seconds; it must not be what ends a wait
BACKENDS = pytest.mark.parametrize("backend", [backend.name for backend in ALL])


def compiled_errors(context: RankContext, backend: str, needs_gradients: bool) -> list[Any]:
    """Body: what a compiled layer raises for wrong ids and for sizes that differ, and whether it is
    right after each."""
    torch._dynamo.reset()
    layer = MoEEpLayer(context.bootstrap(), PARAMS, backend)
    compiled = torch.compile(layer, fullgraph=True)
    x, ids, weights = random_inputs(PARAMS, 5, small_integers, context.rank)
    x.requires_grad_(needs_gradients)
    wrong = ids.clone()
    wrong[3, 1] = 4
    sizes = [{}, {"runtime_max_tokens_per_rank": 5 + context.rank}, {}]
    got: list[Any] = []
    with torch.set_grad_enabled(needs_gradients):
        for given, size in zip((wrong, ids, ids), sizes, strict=True):
            got.append(problem_of(compiled, x, given, weights, **size))
        assert torch.equal(compiled(x, ids, weights), layer(x, ids, weights))
    layer.destroy()
    return got


@pytest.mark.parametrize("needs_gradients", [False, True])
@BACKENDS
def test_a_compiled_layer_raises_what_an_eager_one_does(
    ranks: RunOnRanks, backend: str, needs_gradients: bool
) -> None:
    body = {"backend": backend, "needs_gradients": needs_gradients}
    for rank, (wrong, sizes, good) in enumerate(ranks(2, compiled_errors, **body)):
        expect(wrong, MoEEpInputError, [f"rank {rank} passed 1 expert id", "token 3, slot 1: 4"])
        assert wrong is not None
        assert wrong[1].startswith("rank")  # no name of a class
        expect(sizes, MoEEpDisagreementError, ["5", "6"])
        assert good is None


def compiled_wait(context: RankContext, backend: str) -> Any:
    """Body: what a compiled layer raises whose peer has left."""
    introduce(context)
    torch._dynamo.reset()
    layer = MoEEpLayer(context.bootstrap(), PARAMS, backend)
    compiled = torch.compile(layer, fullgraph=True)
    given = random_inputs(PARAMS, 5, small_integers, context.rank)
    with torch.no_grad():
        compiled(*given)
        if context.rank == 1:
            layer.destroy()
            outlive(0)
            return None
        return problem_of(compiled, *given)


def test_a_compiled_layer_names_a_peer_that_has_left(ranks: RunOnRanks) -> None:
    outcomes = ranks(2, compiled_wait, backend="cake", dedicated=True)
    expect(outcomes[0].value, MoEEpTimeoutError, ["for rank 1", "was destroyed"])


@torch.library.custom_op("moe_ep_tests::unless", mutates_args=())
def unless(rows: torch.Tensor, raises: torch.Tensor) -> torch.Tensor:
    """Return the rows, or raise when the graph runs."""
    if raises.item():
        raise ArithmeticError("too much")
    return rows.clone()


@unless.register_fake
def _(rows: torch.Tensor, raises: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rows)


def abandon_compiled(context: RankContext, backend: str, breaks: bool) -> list[Any]:
    """Body: what a compiled round raises whose experts raise on rank 1 when they run, where all
    abandon what may be open; and whether the rounds after it are right.

    breaks: whether Dynamo breaks the graph around the experts.
    """
    torch._dynamo.reset()
    raises = torch.zeros((), dtype=torch.bool)
    given = random_inputs(PARAMS, 5, small_integers, context.rank)
    with create(context, PARAMS, backend, timeout_sec=BUDGET) as of, torch.no_grad():

        def play(*given: torch.Tensor) -> torch.Tensor:
            rows = of.dispatch(*given).hidden_states
            if breaks:
                torch._dynamo.graph_break()
            rows = unless(rows, raises)
            if breaks:
                torch._dynamo.graph_break()
            return of.combine(rows)

        compiled = torch.compile(play, fullgraph=not breaks)
        wanted = play(*given)
        got: list[Any] = [torch.equal(compiled(*given), wanted)]
        for _ in range(2):
            raises.fill_(context.rank == 1)
            started = time.monotonic()
            got.append(problem_of(compiled, *given))
            if context.rank == 1:
                expect(problem_of(compiled, *given), MoEEpStateError, ["abandon_round"])
            of.abandon_round()
            got.append(time.monotonic() - started)
            raises.fill_(False)
            got += [torch.equal(one(*given), wanted) for one in (compiled, play)]
        return got


@pytest.mark.parametrize("breaks", [False, True])
@BACKENDS
def test_a_compiled_round_can_be_abandoned(ranks: RunOnRanks, backend: str, breaks: bool) -> None:
    for rank, got in enumerate(ranks(3, abandon_compiled, backend=backend, breaks=breaks)):
        before, *rest = got
        assert before
        for problem, seconds, *equal in (rest[:4], rest[4:]):
            if rank == 1:
                expect(problem, ArithmeticError, ["too much"])
            else:
                expect(problem, MoEEpAbandonedError, ["raised on rank(s) 1,"])
            assert seconds < BUDGET / 2
            assert equal == [True, True]
