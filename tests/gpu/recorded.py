"""Rounds that the host only starts: their values are made beforehand, and on a GPU a CUDA graph
plays them. Everything runs on the CPU as well.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep import MoEEpCommunication, MoEEpDispatchResult
from tests.gpu.device_rounds import (
    Received,
    Tokens,
    Verdict,
    capturing,
    expected_sums,
    received_by,
    tokens_of,
)


@dataclass(frozen=True)
class Step:
    """One rank's part of a round of fixed values.

    mine: what it sends; received, sums: what must come to it and come back.
    """

    mine: Tokens
    tokens_per_rank: int
    received: Received
    sums: Tensor

    @classmethod
    def of(
        cls,
        communication: MoEEpCommunication,
        stamp: int,
        counts: Sequence[int],
        tokens_per_rank: int,
        *,
        low_precision: bool = False,
    ) -> Step:
        """counts: the number of tokens of every rank; low_precision: how rows travel back."""
        params, size, rank = communication.params, communication.ep_size, communication.ep_rank
        sent = [
            tokens_of(params, stamp, source, n, communication.device)
            for source, n in enumerate(counts)
        ]
        return cls(
            mine=sent[rank],
            tokens_per_rank=tokens_per_rank,
            received=received_by(params, size, rank, tokens_per_rank, sent),
            sums=expected_sums(params, size, sent[rank], low_precision=low_precision),
        )

    def dispatch(self, communication: MoEEpCommunication) -> MoEEpDispatchResult:
        return communication.dispatch(
            self.mine.hidden_states,
            self.mine.topk_ids,
            self.mine.topk_weights,
            runtime_max_tokens_per_rank=self.tokens_per_rank,
        )


def steps_of(
    communication: MoEEpCommunication, capacities: Sequence[int], first_stamp: int = 0
) -> tuple[list[Step], Verdict]:
    """Return one rank's part of a round of each capacity, and what judges them.

    The ranks send as many tokens as there may be, one fewer or two fewer.
    """
    size = communication.ep_size
    steps = [
        Step.of(communication, stamp, [most - source % 3 for source in range(size)], most)
        for stamp, most in enumerate(capacities, first_stamp)
    ]
    verdict = Verdict(
        communication.params, size, communication.ep_rank, len(steps), communication.device
    )
    return steps, verdict


class Recorded:
    """Work that is done as often as wanted: a CUDA graph of it or, on the CPU, the call."""

    def __init__(self, device: torch.device, work: Callable[[], None]) -> None:
        """Record the work; on a GPU it does not run yet."""
        self._work = work
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog asks for its events meanwhile, from its own thread.
            with capturing(self._graph, device, capture_error_mode="thread_local"):
                work()

    def replay(self) -> None:
        """Do the work; on a GPU it is only started."""
        if self._graph is None:
            self._work()
        else:
            self._graph.replay()


class Delays:
    """Holds a rank up for a random time at random places: its GPU, or its thread on the CPU."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._random = random.Random(seed)
        self._device = device

    def maybe(self, often: float, *most_us: float) -> None:
        """In a share `often` of all calls, wait up to one of these times, in microseconds."""
        if self._random.random() >= often:
            return
        microseconds = self._random.uniform(0, self._random.choice(most_us))
        if self._device.type == "cuda":
            cycles = int(microseconds * _CYCLES_IN_A_MICROSECOND) + 1
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        else:
            time.sleep(microseconds / 1e6)

    def maybe_on_the_host(self, often: float, most_us: float) -> None:
        """The same, and always of the thread: the GPU runs dry. Not in a capture."""
        if self._random.random() < often:
            time.sleep(self._random.uniform(0, most_us) / 1e6)


_CYCLES_IN_A_MICROSECOND = 1800  # nearly; nothing depends on it
