"""What is timed on GPUs? Rounds of a backend, in a captured graph, compiled, or one by one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TypeAlias

import torch
from contestants import Contestant
from places import Place, timing_events
from rounds import Rounds, poison
from torch import Tensor
from torch._dynamo.utils import counters

from moe_ep import MoEEpDispatchResult

LastRound: TypeAlias = "tuple[MoEEpDispatchResult | None, Tensor]"
"""What the last of many rounds has received, None where it lies in a workspace; and its sums."""


def rounds_per_sample(tokens: int) -> int:
    """Return how many rounds one graph holds: enough to hide what its launch costs."""
    return 50 if tokens <= 256 else 20 if tokens <= 1024 else 8


def capture(body: Callable[[], None]) -> Callable[[], None]:
    """Return what replays `body`'s device work on the current stream. It has run once before."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    # Other threads (of NCCL, say) may call CUDA during the capture.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body()
    return graph.replay


class CudaRounds(Contestant):
    """What eager loops and graphs have in common."""

    def __init__(self, rounds: Rounds, counted_bytes: int, tokens: int, place: Place) -> None:
        self.name = rounds.variant.label
        self.counted_bytes = counted_bytes
        self.rounds_per_sample = rounds_per_sample(tokens)
        self._rounds = rounds
        self._line_up = place.spin.wait

    def verify(self) -> None:
        self._rounds.verify()
        self._rounds.check()

    def verify_last_round(self) -> None:
        self._rounds.verify_last(self._rounds.received)
        self._rounds.check()

    def close(self) -> None:
        torch.cuda.synchronize()
        self._rounds.close()

    def _issue(self) -> None:
        for _ in range(self.rounds_per_sample):
            self._rounds.dispatch()
            self._rounds.combine()


class EagerRounds(CudaRounds):
    """A loop in Python. host: until the last round is issued, without waiting for the device."""

    mode = "eager"
    phases = ("host", "round")

    def run(self, samples: int) -> list[tuple[float, ...]]:
        begin, end = timing_events()
        stamps: list[tuple[float, ...]] = []
        for _ in range(samples):
            self._line_up()
            start = time.perf_counter()
            begin.record()
            self._issue()
            end.record()
            host = time.perf_counter() - start
            end.synchronize()
            device = begin.elapsed_time(end) * 1e-3
            stamps.append((host / self.rounds_per_sample, device / self.rounds_per_sample))
        return stamps


class GraphRounds(CudaRounds):
    """One CUDA graph of many rounds, replayed; the ranks start each replay together."""

    mode = "graph"
    _replay: Callable[[], None] | None = None
    _captured: MoEEpDispatchResult | None = None
    _leads_in = False

    def verify(self) -> None:
        super().verify()
        if self._replay is None:  # captured after an eager round, as the contract asks
            self._replay = capture(self._issue)
            self._captured = self._rounds.received

    def verify_last_round(self) -> None:
        self._rounds.verify_last(self._captured)
        self._rounds.check()

    def run(self, samples: int) -> list[tuple[float, ...]]:
        replay = self._replay
        assert replay is not None, "verify comes first: it captures"
        begin, end = timing_events()
        stamps: list[tuple[float, ...]] = []
        for _ in range(samples):
            self._line_up()
            if self._leads_in:
                replay()
            begin.record()
            replay()
            end.record()
            end.synchronize()
            stamps.append((begin.elapsed_time(end) * 1e-3 / self.rounds_per_sample,))
        return stamps

    def close(self) -> None:
        torch.cuda.synchronize()
        self._replay = self._captured = None  # their memory goes before the workspace
        super().close()


class SteadyGraphRounds(GraphRounds):
    """A graph that starts while its own previous replay still runs: neither the launch nor what the
    hosts start apart is in the time.
    """

    mode = "steady"
    _leads_in = True


class PhasedGraphRounds(GraphRounds):
    """A graph with an event after every call. The kernels no longer overlap, so that a round takes
    longer than without; dispatch and combine can be told apart.
    """

    mode = "phases"
    phases = ("dispatch", "combine", "round")

    def __init__(self, rounds: Rounds, counted_bytes: int, tokens: int, place: Place) -> None:
        super().__init__(rounds, counted_bytes, tokens, place)
        # External: nodes of the graph that record anew in each replay.
        self._events = [
            torch.cuda.Event(enable_timing=True, external=True)
            for _ in range(2 * self.rounds_per_sample + 1)
        ]

    def run(self, samples: int) -> list[tuple[float, ...]]:
        replay, events = self._replay, self._events
        assert replay is not None, "verify comes first: it captures"
        stamps: list[tuple[float, ...]] = []
        for _ in range(samples):
            self._line_up()
            replay()
            torch.cuda.current_stream().synchronize()
            steps = [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(events)]
            dispatch = sum(steps[0::2]) / self.rounds_per_sample
            combine = sum(steps[1::2]) / self.rounds_per_sample
            stamps.append((dispatch, combine, dispatch + combine))
        return stamps

    def _issue(self) -> None:
        self._events[0].record()
        for index in range(self.rounds_per_sample):
            self._rounds.dispatch()
            self._events[2 * index + 1].record()
            self._rounds.combine()
            self._events[2 * index + 2].record()


class CompiledRounds(CudaRounds):
    """As GraphRounds, but compiled by torch.compile, which makes the CUDA graph (reduce-overhead).

    As in a layer, nothing that was received outlives its combine, whose sums are new memory; the
    experts' rows lie in ordinary memory. Where the backend leaves what was received in a workspace,
    that is looked at there; else the graph returns that of the last round.
    """

    mode = "compiled"
    _compiled: Callable[[], LastRound] | None = None
    _last: LastRound | None = None
    _leads_in = False

    def verify(self) -> None:
        super().verify()
        if self._last is not None:
            received, sums = self._last
            if received is not None:
                poison(received)
            sums.fill_(float("nan"))
        if self._compiled is None:
            self._rounds.keep_addresses()
            self._compiled = torch.compile(self._many, fullgraph=True, mode="reduce-overhead")
            with torch.no_grad():
                for _ in range(3):  # warmed up, captured, replayed
                    self._compiled()
            if counters["inductor"]["cudagraph_skips"]:
                raise AssertionError("Inductor captured no graph of the compiled rounds")

    def run(self, samples: int) -> list[tuple[float, ...]]:
        rounds = self._compiled
        assert rounds is not None, "verify comes first: it compiles"
        begin, end = timing_events()
        stamps: list[tuple[float, ...]] = []
        with torch.no_grad():
            for _ in range(samples):
                self._last = None  # its memory is that of the next replay
                self._line_up()
                if self._leads_in:
                    rounds()
                begin.record()
                self._last = rounds()
                end.record()
                end.synchronize()
                stamps.append((begin.elapsed_time(end) * 1e-3 / self.rounds_per_sample,))
        return stamps

    def verify_last_round(self) -> None:
        assert self._last is not None, "no round was run"
        received, sums = self._last
        self._rounds.verify_last(self._rounds.received if received is None else received, sums)
        self._rounds.check()

    def _many(self) -> LastRound:
        for _ in range(self.rounds_per_sample - 1):
            self._rounds.functional_round()
        received, sums = self._rounds.functional_round()
        return None if self._rounds.stays_in_workspace else received, sums


class SteadyCompiledRounds(CompiledRounds):
    """With a replay in front of the timed one, as in SteadyGraphRounds: what Python does before the
    launch of a compiled graph is not in the time, as it is not in a model's of many layers.
    """

    mode = "compiled-steady"
    _leads_in = True


MODES: dict[str, type[CudaRounds]] = {
    "graph": GraphRounds,
    "steady": SteadyGraphRounds,
    "eager": EagerRounds,
    "phases": PhasedGraphRounds,
    "compiled": CompiledRounds,
    "compiled-steady": SteadyCompiledRounds,
}


def cuda_contestant(rounds: Rounds, counted_bytes: int, tokens: int, place: Place) -> CudaRounds:
    """Return the contestant for the variant's mode; eager where the backend has no graphs."""
    kind = MODES[rounds.variant.mode] if rounds.can_be_captured else EagerRounds
    return kind(rounds, counted_bytes, tokens, place)
