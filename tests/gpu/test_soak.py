"""Is every one of many rounds exact when the ranks' GPU work drifts apart at random places?

MOE_EP_SOAK_ROUNDS: how many rounds each configuration plays from a CUDA graph; those that the host
makes one by one are a twentieth of it, and not less than 200. Each configuration prints a line.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass

import pytest
import torch

from moe_ep import MoEEpCommParams, MoEEpCommunication, _native
from tests.backends import Backend, on_shared_gpus
from tests.conftest import RunOnRanks
from tests.gpu.device_rounds import Verdict, expected_sums, partial_rows, tokens_of
from tests.gpu.recorded import Delays, Recorded, Step
from tests.ranks import RankContext
from tests.rounds import create

ROUNDS = int(os.environ.get("MOE_EP_SOAK_ROUNDS", "200"))
ROUNDS_OF_THE_HOST = max(200, ROUNDS // 20)
SECONDS = 60 + ROUNDS_OF_THE_HOST / 5
# Steps of a few tokens and of many take different ways through the kernels.
TOKENS = (1, 2, 4, 8, 8, 16, 64, 160, 512)
CHECK_EVERY = 100
ROUNDS_IN_A_GRAPH = 20
SIZES = (2, 4, 8)
TOP_K = 8


@dataclass(frozen=True)
class Geometry:
    """Rounds that share a graph. capacities: the most tokens of a rank in each, in turn."""

    capacities: tuple[int, ...]
    hidden_size: int = 1024
    low_precision: bool = False

    def params(self) -> MoEEpCommParams:
        return MoEEpCommParams(64, TOP_K, max(self.capacities), self.hidden_size)


# Each has its own kernels and sizes of grids: for packets, rows stored directly, many rows, and
# expert outputs as FP8.
GEOMETRIES = {
    "packets": Geometry((1, 8, 2, 5)),
    "direct": Geometry((33, 128, 40, 64)),
    "many": Geometry((136, 264, 160)),
    "FP8": Geometry((160, 3, 264, 40, 1), hidden_size=5000, low_precision=True),
}

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.slow,
    pytest.mark.timeout(60 + SECONDS),
]


def soak(context: RankContext, backend: str, params: MoEEpCommParams, rounds: int) -> None:
    """Body: no two rounds are alike, and the host waits for the device only now and then."""
    rank, size = context.rank, context.size
    plan = random.Random(size)  # the same on every rank
    with create(context, params, backend) as communication:
        device = communication.device
        delays = Delays(100 * size + rank, device)

        def maybe_wait() -> None:
            delays.maybe(0.47, 100, 100, 1000)
            delays.maybe_on_the_host(0.03, 3000)

        verdict = Verdict(params, size, rank, rounds, device)
        for index in range(rounds):
            most = plan.choice(TOKENS)
            counts = [plan.randint(0, most) for _ in range(size)]
            with_weights = plan.random() < 0.8
            zero_copy = plan.random() < 0.5
            sent = [tokens_of(params, index, r, n, device) for r, n in enumerate(counts)]
            mine = sent[rank]
            maybe_wait()
            result = communication.dispatch(
                mine.hidden_states,
                mine.topk_ids,
                mine.topk_weights if with_weights else None,
                runtime_max_tokens_per_rank=most,
            )
            maybe_wait()
            verdict.judge_dispatch(index, result, sent)
            partial = partial_rows(params, size, rank, result)
            buffer = communication.get_combine_input_buffer() if zero_copy else None
            if buffer is not None:
                partial = buffer.copy_(partial)
            maybe_wait()
            combined = communication.combine(partial)
            maybe_wait()
            wanted = expected_sums(params, size, mine, with_weights=with_weights)
            verdict.judge_sums(index, combined, wanted)
            if index % CHECK_EVERY == CHECK_EVERY - 1:
                communication.check()
                verdict.require()
        communication.check()
        verdict.require()


@on_shared_gpus
@pytest.mark.parametrize(
    ("size", "params"),
    [
        (2, MoEEpCommParams(64, 8, 512, 2048)),
        (4, MoEEpCommParams(30, 6, 512, 1001, torch.float16)),
        (8, MoEEpCommParams(256, 8, 512, 1024)),
    ],
    ids=["2 ranks", "4 ranks, odd rows", "8 ranks"],
)
def test_no_round_is_wrong_however_the_ranks_drift(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, params: MoEEpCommParams
) -> None:
    ranks(
        size,
        soak,
        device=device,
        seconds=SECONDS,
        backend=backend.name,
        params=params,
        rounds=ROUNDS_OF_THE_HOST,
    )


class SoakRounds:
    """Some rounds one behind the other, no two alike, with delays at random places.

    All sums are judged, and what came in four rounds of five.
    """

    def __init__(
        self,
        communication: MoEEpCommunication,
        capacities: tuple[int, ...],
        low_precision: bool,
    ) -> None:
        params, size = communication.params, communication.ep_size
        rank, device = communication.ep_rank, communication.device
        plan = random.Random(size)  # the same on every rank
        self._communication = communication
        self._steps = []
        for index in range(ROUNDS_IN_A_GRAPH):
            most = capacities[index % len(capacities)]
            counts = [plan.randint(0, most) for _ in range(size)]
            self._steps.append(
                Step.of(communication, index, counts, most, low_precision=low_precision)
            )
        # What comes is judged bit for bit, so the experts need not compute from it again.
        self._partials = [partial_rows(params, size, rank, step.received) for step in self._steps]
        self._delays = Delays(100 * size + rank, device)
        self.verdict = Verdict(params, size, rank, len(self._steps), device)

    def play(self) -> None:
        communication, verdict, steps = self._communication, self.verdict, self._steps
        combined = None
        for index, step in enumerate(steps):
            self._delays.maybe(0.3, 10, 60)
            result = step.dispatch(communication)
            if combined is not None:  # late, so that the dispatch is launched with the combine
                verdict.judge_sums(index - 1, combined, steps[index - 1].sums)
            partial = self._partials[index]
            if index % 5 != 4:  # else the combine is launched with the dispatch
                self._delays.maybe(0.3, 10, 60)
                verdict.judge_received(index, result, step.received)
                if index % 5 in (0, 2):
                    buffer = communication.get_combine_input_buffer()
                    partial = partial if buffer is None else buffer.copy_(partial)
                self._delays.maybe(0.3, 10, 60)
            combined = communication.combine(partial)
        assert combined is not None
        verdict.judge_sums(len(steps) - 1, combined, steps[-1].sums)


def soak_from_a_graph(
    context: RankContext,
    backend: str,
    params: MoEEpCommParams,
    capacities: tuple[int, ...],
    options: dict[str, bool],
    rounds: int,
) -> tuple[int, float]:
    """Body: replay one graph of some rounds, with more delays between the replays; return how many
    rounds that were, and the seconds they took.
    """
    with create(context, params, backend, **options) as communication:
        device = communication.device
        low_precision = options.get("use_low_precision_combine", False)
        soaked = SoakRounds(communication, capacities, low_precision)
        soaked.play()
        communication.check()
        soaked.verdict.require()
        recorded = Recorded(device, soaked.play)
        delays = Delays(100 * context.size + context.rank, device)
        replays = -(-rounds // ROUNDS_IN_A_GRAPH)
        context.barrier()
        started = time.monotonic()
        for replay in range(replays):
            delays.maybe(0.5, 50, 500)
            delays.maybe_on_the_host(0.05, 3000)
            recorded.replay()
            if replay % CHECK_EVERY == CHECK_EVERY - 1:
                communication.check()
                soaked.verdict.require()
        communication.check()
        seconds = time.monotonic() - started
        soaked.verdict.require()
        return replays * ROUNDS_IN_A_GRAPH, seconds


@pytest.mark.parametrize("size", SIZES)
def test_each_geometry_goes_the_way_that_it_is_named_after(size: int) -> None:
    for name in ("packets", "direct", "many"):
        capacities = GEOMETRIES[name].capacities
        few = _native.low_latency_tokens(size, TOP_K, max(capacities))
        assert all((most <= few) == (name == "packets") for most in capacities)


@on_shared_gpus
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("enable_pdl", [True, False], ids=["PDL", "no PDL"])
@pytest.mark.parametrize("size", SIZES)
def test_no_captured_round_is_wrong_however_the_ranks_drift(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    size: int,
    enable_pdl: bool,
    geometry: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rounds = GEOMETRIES[geometry]
    if not backend.pdl and not enable_pdl:
        pytest.skip(f"{backend} has no programmatic launch to do without")
    if not backend.low_precision and rounds.low_precision:
        pytest.skip(f"{backend} takes expert outputs as they are")
    options = {"enable_pdl": enable_pdl} if backend.pdl else {}
    if rounds.low_precision:
        options["use_low_precision_combine"] = True
    results = ranks(
        size,
        soak_from_a_graph,
        device=device,
        seconds=SECONDS,
        backend=backend.name,
        params=rounds.params(),
        capacities=rounds.capacities,
        options=options,
        rounds=ROUNDS,
    )
    how = f"{backend}, {size} ranks on {device}, PDL {'on' if enable_pdl else 'off'}, {geometry}"
    report(results, how, capsys)


def report(results: list[tuple[int, float]], how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Require that all ranks have played so many rounds, and print how many.

    results: of every rank, as soak_from_a_graph returns them.
    """
    played, seconds = zip(*results, strict=True)
    assert min(played) == max(played) >= ROUNDS
    with capsys.disabled():
        print(f"\nsoak: {how}: {played[0]} rounds on every rank, none wrong, {max(seconds):.1f} s")
