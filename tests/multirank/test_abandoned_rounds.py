"""Where experts raise on some ranks, do all hear of it at once, and go on?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import (
    MoEEpAbandonedError,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpConfigError,
    MoEEpDispatchResult,
    MoEEpLayer,
    MoEEpStateError,
    SplitConfig,
)
from moe_ep.cake.kernels import active_rank_mask
from tests.backends import Backend, on_each, on_the_cpu
from tests.conftest import RunOnRanks
from tests.problems import Problem, expect, problem_of
from tests.ranks import RankContext
from tests.ranks.devices import CPU, NCCL
from tests.rounds import Played, Round, check_all, create, on_device_of, play_round, random_round

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(8, 3, 5, 24)
SIZE = 4
BUDGET = 60  # seconds; it must not be what ends a wait
SOON = 20  # seconds, on a machine with other work
AFTERWARDS = [random_round(PARAMS, (3, 5, 0, 1), seed=2), random_round(PARAMS, (0, 1, 5, 5), 3)]
where_peers_are_told = on_each(devices=(CPU, NCCL))  # kernels that wait for others are not


def dispatch(communication: MoEEpCommunication, **more: Any) -> MoEEpDispatchResult:
    one, rank = random_round(PARAMS, (3, 0, 5, 2), seed=1), communication.ep_rank
    given = (one.hidden_states[rank], one.topk_ids[rank], one.topk_weights[rank])
    return communication.dispatch(*(on_device_of(communication, t) for t in given), **more)


def combine_or_abandon(
    communication: MoEEpCommunication, raising: Sequence[int], **more: Any
) -> Problem | None:
    """Play a round in which experts of some ranks raise. Return what comes out of it."""
    received = dispatch(communication, **more)

    def rest() -> None:
        try:
            if communication.ep_rank in raising:
                raise ArithmeticError("too much")
        except ArithmeticError:
            communication.abandon_round()
            raise
        communication.combine(received.hidden_states.clone(), **more)

    return problem_of(rest)


def abandon(
    context: RankContext, backend: str, raising: Sequence[Sequence[int]], rounds: Sequence[Round]
) -> tuple[list[Problem | None], float, list[Played]]:
    """Body: abandoned rounds, how long they took, and rounds after them."""
    options = {} if context.device == NCCL else {"timeout_sec": BUDGET}
    with create(context, PARAMS, backend, **options) as communication:
        started = time.monotonic()
        problems = [combine_or_abandon(communication, who) for who in raising]
        seconds = time.monotonic() - started
        communication.abandon_round()  # there is none: nothing happens
        return problems, seconds, [play_round(communication, one) for one in rounds]


@where_peers_are_told
def test_all_ranks_hear_of_experts_that_raise_and_go_on(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    raising = [[1], [0, 2], [0, 1, 2, 3], [3]]
    body = {"raising": raising, "rounds": AFTERWARDS}
    got = ranks(SIZE, abandon, device=device, backend=backend.name, **body)
    for rank, (problems, seconds, _) in enumerate(got):
        assert seconds < SOON
        for who, problem in zip(raising, problems, strict=True):
            if rank in who:
                expect(problem, ArithmeticError, ["too much"])
            else:
                named = ", ".join(map(str, who))
                words = [f"raised on rank(s) {named},", "the next dispatch is as always"]
                expect(problem, MoEEpAbandonedError, words)
    check_all(PARAMS, AFTERWARDS, [played for *_, played in got])


def abandon_without_a_rank(context: RankContext, backend: str) -> list[Problem | None]:
    """Body: of three ranks one is masked off, and has nothing to do with what the others do."""
    with create(context, PARAMS, backend, enable_rank_mask=True) as communication:
        if context.rank == 2:
            return []
        mask = active_rank_mask([0, 1], context.size)
        return [combine_or_abandon(communication, [1], active_rank_mask=mask) for _ in range(2)]


@on_each(having="masks", devices=(CPU,))
def test_a_masked_rank_is_not_waited_for(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    peer, raised, _ = ranks(3, abandon_without_a_rank, backend=backend.name)
    for problem in peer:
        expect(problem, MoEEpAbandonedError, ["raised on rank(s) 1,"])
    for problem in raised:
        expect(problem, ArithmeticError, ["too much"])


def layer_that_raises(context: RankContext, backend: str) -> list[Any]:
    """Body: a layer whose experts raise on one rank, or return what combine refuses, with gradients
    and without."""
    layer = MoEEpLayer(context.bootstrap(), PARAMS, SplitConfig(comm=backend))
    experts, got = layer.kernel.forward, []
    one, rank = random_round(PARAMS, (3, 0, 5, 2), seed=1), context.rank
    given: list[Tensor] = [one.hidden_states[rank], one.topk_ids[rank], one.topk_weights[rank]]

    def raising(received: MoEEpDispatchResult) -> Tensor:
        raise ArithmeticError("too much")

    def wrong(received: MoEEpDispatchResult) -> Tensor:
        return experts(received)[1:]

    for needs_gradients, odd in ((False, raising), (True, raising), (False, wrong), (True, wrong)):
        given[0] = given[0].detach().requires_grad_(needs_gradients)
        layer.kernel.forward = odd if rank == 2 else experts
        problem = problem_of(layer, *given)
        layer.kernel.forward = experts
        with torch.set_grad_enabled(needs_gradients):
            got.append((problem, layer(*given).detach()))
    layer.destroy()
    return got


@on_the_cpu
def test_a_layer_tells_the_peers_of_its_experts(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for rank, got in enumerate(ranks(SIZE, layer_that_raises, backend=backend.name)):
        for index, (problem, sums) in enumerate(got):
            if rank != 2:
                expect(problem, MoEEpAbandonedError, ["raised on rank(s) 2,"])
            elif index < 2:
                expect(problem, ArithmeticError, ["too much"])
            else:
                expect(problem, MoEEpConfigError, ["expert_output must be"])
            assert torch.equal(sums, got[0][1])


def forget_the_round(context: RankContext, backend: str) -> Problem | None:
    """Body: what a dispatch says where the round before is open."""
    with create(context, PARAMS, backend) as communication:
        received = dispatch(communication)
        problem = problem_of(dispatch, communication)
        communication.combine(received.hidden_states.clone())
        return problem


@on_the_cpu
def test_a_dispatch_in_an_open_round_says_what_to_do(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for problem in ranks(2, forget_the_round, backend=backend.name):
        expect(problem, MoEEpStateError, ["while a round is open", "abandon_round"])
