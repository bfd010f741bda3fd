"""Does a captured round do with new values what an eager one does, as often as it is replayed?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import MoEEpCommParams, MoEEpStateError
from tests.backends import SHARED_GPUS, Backend, on_each, on_shared_gpus
from tests.conftest import RunOnRanks
from tests.gpu.captured_rounds import CapturedRound, play_eagerly, run_round, sent_by_all
from tests.gpu.device_rounds import Verdict, capturing, expected_sums, tokens_of
from tests.problems import Problem, expect, problem_of
from tests.ranks import RankContext
from tests.ranks.devices import ONE_GPU
from tests.rounds import create

pytestmark = pytest.mark.multirank
CAPTURED_TOKENS = 8
VALID_ROWS = (8, 0, 3, 8)
REPLAYS = 200
PARAMS = MoEEpCommParams(24, 4, 160, 1000)
sizes = pytest.mark.parametrize("size", [2, 8])


def replay_with_new_values(
    context: RankContext,
    backend: str,
    *,
    combine_input: str = "tensor",
    eager_between: bool = False,
    **options: bool,
) -> None:
    """Body: every replay has other values and, by turns, another number of valid rows."""
    size = context.size
    with create(context, PARAMS, backend, **options) as communication:
        assert communication.supports_cuda_graph
        captured = CapturedRound(communication, CAPTURED_TOKENS, CAPTURED_TOKENS, combine_input)
        verdict = Verdict(PARAMS, size, context.rank, REPLAYS, communication.device)
        eager_verdict = Verdict(PARAMS, size, context.rank, REPLAYS, communication.device)
        for index in range(REPLAYS):
            # First all ranks alike, then each at another place of the sequence.
            shift = index >= REPLAYS // 2
            valid = [VALID_ROWS[(index + shift * source) % 4] for source in range(size)]
            sent = sent_by_all(communication, 1 + index, [CAPTURED_TOKENS] * size, valid)
            captured.replay(verdict, index, sent)
            if eager_between and index % 7 == 0:
                most = (5, 160, 8, 1, 40)[index // 7 % 5]
                counts = [(most - source) % (most + 1) for source in range(size)]
                play_eagerly(communication, eager_verdict, index, counts, most)
        communication.check()
        verdict.require()
        eager_verdict.require()


def play_replays(ranks: RunOnRanks, backend: Backend, device: str, size: int, **how: Any) -> None:
    """how: as of replay_with_new_values."""
    ranks(size, replay_with_new_values, device=device, seconds=60, backend=backend.name, **how)


@on_shared_gpus
@sizes
@pytest.mark.parametrize("eager_between", [False, True], ids=["alone", "between_eager_rounds"])
def test_each_replay_equals_the_oracle(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, eager_between: bool
) -> None:
    play_replays(ranks, backend, device, size, eager_between=eager_between)


@on_each(having="zero_copy", devices=SHARED_GPUS)
@sizes
def test_each_replay_with_experts_in_place_equals_the_oracle(
    ranks: RunOnRanks, backend: Backend, device: str, size: int
) -> None:
    play_replays(ranks, backend, device, size, combine_input="buffer")


@on_each(having="low_precision", devices=SHARED_GPUS)
def test_each_replay_in_low_precision_equals_the_oracle(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    play_replays(ranks, backend, device, 2, use_low_precision_combine=True)


@on_each(named="cake", devices=(ONE_GPU,))
@sizes
def test_each_replay_in_low_precision_with_experts_in_place_equals_the_oracle(
    ranks: RunOnRanks, backend: Backend, device: str, size: int
) -> None:
    how: dict[str, Any] = {"combine_input": "buffer", "use_low_precision_combine": True}
    play_replays(ranks, backend, device, size, **how)


def replay_in_turn(context: RankContext, backend: str, capacities: list[int]) -> None:
    """Body: one communication's graphs of several capacities, replayed in turn."""
    size = context.size
    with create(context, PARAMS, backend) as communication:
        captured = {
            capacity: CapturedRound(communication, capacity, capacity) for capacity in capacities
        }
        rounds = 50 * len(capacities)
        verdict = Verdict(PARAMS, size, context.rank, rounds, communication.device)
        for index in range(rounds):
            capacity = capacities[index % len(capacities)]
            valid = [(index * 3 + source) % (capacity + 1) for source in range(size)]
            sent = sent_by_all(communication, 1 + index, [capacity] * size, valid)
            captured[capacity].replay(verdict, index, sent)
        communication.check()
        verdict.require()


@on_shared_gpus
@sizes
def test_graphs_of_different_capacity_may_be_replayed_in_turn(
    ranks: RunOnRanks, backend: Backend, device: str, size: int
) -> None:
    ranks(
        size,
        replay_in_turn,
        device=device,
        backend=backend.name,
        capacities=[8, 3, 160],
        seconds=60,
    )


def replay_layers_in_turn(
    context: RankContext, backend: str, layers: tuple[MoEEpCommParams, ...], capacities: list[int]
) -> None:
    """Body: graphs of layers of one arena, of each capacity, replayed in turn."""
    size, rounds = context.size, 50 * len(layers)
    communications = [create(context, params, backend, arena=layers) for params in layers]
    device = communications[0].device
    captured = {
        (index, capacity): CapturedRound(communication, capacity, capacity)
        for index, communication in enumerate(communications)
        for capacity in capacities
    }
    verdicts = [Verdict(params, size, context.rank, rounds, device) for params in layers]
    for index in range(rounds):
        layer = index * 2 % len(layers)
        capacity = capacities[index // 3 % len(capacities)]
        valid = [(index * 3 + source) % (capacity + 1) for source in range(size)]
        sent = sent_by_all(communications[layer], 1 + index, [capacity] * size, valid)
        captured[layer, capacity].replay(verdicts[layer], index, sent)
    for communication, verdict in zip(communications, verdicts, strict=True):
        communication.check()
        verdict.require()
    for communication in communications:
        communication.destroy()


@on_shared_gpus
@sizes
def test_graphs_of_different_layers_of_an_arena_may_be_replayed_in_turn(
    ranks: RunOnRanks, backend: Backend, device: str, size: int
) -> None:
    ranks(
        size,
        replay_layers_in_turn,
        device=device,
        backend=backend.name,
        layers=(PARAMS, MoEEpCommParams(10, 8, 160, 256), MoEEpCommParams(7, 2, 40, 4096)),
        capacities=[8, 3, 40],
        seconds=60,
    )


def replay_far_ahead(context: RankContext, backend: str, replays: int) -> Tensor:
    """Body: the host queues all replays at once; return how often which round's sums came."""
    with create(context, PARAMS, backend) as communication:
        device, rank = communication.device, context.rank
        inputs = tokens_of(PARAMS, 1, rank, CAPTURED_TOKENS, device)
        first = inputs.hidden_states.clone()
        run_round(communication, inputs, CAPTURED_TOKENS, "tensor")
        communication.check()
        wanted = expected_sums(PARAMS, context.size, inputs)
        differences = torch.zeros((), dtype=torch.int64, device=device)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, device):
            _, combined = run_round(communication, inputs, CAPTURED_TOKENS, "tensor")
            # Halved inputs give halved sums, exactly: powers of two.
            differences += (combined != wanted).sum()
            inputs.hidden_states.mul_(0.5)
            wanted.mul_(0.5)
        assert inputs.hidden_states.equal(first)  # capturing has run nothing
        for _ in range(replays):
            graph.replay()
        communication.check()
        return differences.cpu()


@on_shared_gpus
@sizes
def test_replays_may_be_queued_far_ahead(
    ranks: RunOnRanks, backend: Backend, device: str, size: int
) -> None:
    """Nothing of a round is on the host: neither its number nor what comes next."""
    differences = ranks(
        size, replay_far_ahead, device=device, backend=backend.name, replays=60, seconds=60
    )
    assert [int(one) for one in differences] == [0] * size


def capture_first(context: RankContext, backend: str) -> Problem | None:
    """Body: capture without an eager round before; then as one should."""
    with create(context, PARAMS, backend) as communication:
        tokens = tokens_of(PARAMS, 0, context.rank, CAPTURED_TOKENS, communication.device)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, communication.device):
            tokens.hidden_states.add_(0)  # a graph with nothing in it is warned of
            problem = problem_of(
                communication.dispatch,
                tokens.hidden_states,
                tokens.topk_ids,
                tokens.topk_weights,
                runtime_max_tokens_per_rank=CAPTURED_TOKENS,
            )
        captured = CapturedRound(communication, CAPTURED_TOKENS, CAPTURED_TOKENS)
        verdict = Verdict(PARAMS, context.size, context.rank, 4, communication.device)
        for index in range(4):
            sent = sent_by_all(communication, 1 + index, [CAPTURED_TOKENS] * context.size)
            captured.replay(verdict, index, sent)
        communication.check()
        verdict.require()
        return problem


@on_shared_gpus
def test_first_use_under_capture_raises_and_leaves_the_object_ready(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for problem in ranks(2, capture_first, device=device, backend=backend.name, seconds=60):
        expect(problem, MoEEpStateError, ["captured"])
