"""Do compiled layers raise the errors of the library, and go on where eager ones do?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ep import (
    MoEEpCommParams,
    MoEEpDisagreementError,
    MoEEpInputError,
    MoEEpLayer,
    MoEEpTimeoutError,
)
from tests.backends import ALL
from tests.conftest import RunOnRanks
from tests.problems import expect, problem_of
from tests.ranks import RankContext
from tests.ranks.waiting import introduce, outlive
from tests.rounds.layers import random_inputs, small_integers

PARAMS = MoEEpCommParams(4, 2, 8, 16)
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
