"""Are rounds exact where ranks launch differently: some with programmatic launch and some without,
or with other numbers of CTAs, and the calls of a round on streams of their own?
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from moe_ep import MoEEpCommParams, MoEEpCommunication
from tests.backends import EVERYWHERE, Backend, on_each
from tests.conftest import RunOnRanks
from tests.gpu.device_rounds import partial_rows
from tests.gpu.recorded import Recorded, steps_of
from tests.ranks import RankContext
from tests.ranks.devices import CPU
from tests.rounds import create

pytestmark = pytest.mark.multirank
CAPACITIES = (8, 160, 40, 3, 5, 264)
DISPATCH, EXPERTS, COMBINE = range(3)


class Streams:
    """The streams of a round's parts; each part waits for the one before it."""

    def __init__(self, device: torch.device, *, apart: bool) -> None:
        """apart: a stream for each part; else, and on the CPU, all run on the current one."""
        self._streams: list[torch.cuda.Stream] = []
        if apart and device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(3)]  # type: ignore[no-untyped-call]
        self._before: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """What comes now follows what is on the current stream."""
        self._before = torch.cuda.current_stream() if self._streams else None

    def on(self, part: int) -> AbstractContextManager[object]:
        if self._before is None:
            return nullcontext()
        stream = self._streams[part]
        if stream != self._before:
            stream.wait_stream(self._before)  # by an event
            self._before = stream
        return torch.cuda.stream(stream)

    def end(self) -> None:
        """What comes on the current stream follows all parts."""
        if self._before is not None:
            torch.cuda.current_stream().wait_stream(self._before)


class Rounds:
    """Rounds one behind the other, without the host."""

    def __init__(self, communication: MoEEpCommunication, streams: Streams) -> None:
        self._communication = communication
        self._streams = streams
        self._steps, self.verdict = steps_of(communication, CAPACITIES)

    def play(self) -> None:
        communication, streams = self._communication, self._streams
        streams.begin()
        for index, step in enumerate(self._steps):
            with streams.on(DISPATCH):
                result = step.dispatch(communication)
            with streams.on(EXPERTS):
                self.verdict.judge_received(index, result, step.received)
                partial = partial_rows(
                    communication.params, communication.ep_size, communication.ep_rank, result
                )
            with streams.on(COMBINE):
                combined = communication.combine(partial)
                self.verdict.judge_sums(index, combined, step.sums)
        streams.end()


def play_differently(
    context: RankContext,
    backend: str,
    options: Sequence[dict[str, Any]],
    hidden_size: int,
    apart: bool,
    captured: bool,
    times: int,
) -> None:
    """Body: the ranks take the options in turn."""
    params = MoEEpCommParams(24, 4, max(CAPACITIES), hidden_size)
    own = options[context.rank % len(options)]
    with create(context, params, backend, **own) as communication:
        rounds = Rounds(communication, Streams(communication.device, apart=apart))
        rounds.play()
        communication.check()
        rounds.verdict.require()
        again = Recorded(communication.device, rounds.play).replay if captured else rounds.play
        for _ in range(times):
            again()
        communication.check()
        rounds.verdict.require()


@on_each(having="workspace", devices=EVERYWHERE)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("apart", [False, True], ids=["one stream", "three streams"])
def test_ranks_may_launch_their_kernels_differently(
    ranks: RunOnRanks, backend: Backend, device: str, captured: bool, apart: bool
) -> None:
    on_cpu = device == CPU
    ranks(
        4,
        play_differently,
        device=device,
        backend=backend.name,
        # Every second rank without programmatic launch, or with few multiprocessors.
        options=[{}, {"enable_pdl": False} if backend.pdl else {"max_sm_count": 3}],
        hidden_size=64 if on_cpu else 1000,
        apart=apart,
        captured=captured,
        times=2 if on_cpu else 30,
        seconds=60,
    )
