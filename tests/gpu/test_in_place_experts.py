"""Are rows that experts wrote where they came from staged before a peer sends its next ones there?

Combine copies such rows into the workspace and tells the sources. A source that were told of its
own block alone would go on to its next dispatch, which with another tokens_per_rank writes into
other blocks: into rows that a slow rank has still to copy.
"""

from __future__ import annotations

import pytest

from moe_ep import MoEEpCommParams, MoEEpCommunication
from tests.backends import EVERYWHERE, Backend, on_each
from tests.conftest import RunOnRanks
from tests.gpu.device_rounds import partial_rows
from tests.gpu.recorded import Delays, Recorded, steps_of
from tests.ranks import RankContext
from tests.ranks.devices import CPU
from tests.rounds import create

pytestmark = pytest.mark.multirank
# Neighbours differ, so that blocks move. Where they grow, the first rows that a source sends next
# lie in blocks that are staged behind its own. All ways of dispatch and combine are among them.
CAPACITIES = (64, 160, 264, 128, 400, 24, 200, 40)


class InPlaceRounds:
    """Rounds one behind the other, whose experts write over what they received."""

    def __init__(self, communication: MoEEpCommunication, delays: Delays) -> None:
        self._communication = communication
        self._delays = delays
        self._steps, self.verdict = steps_of(communication, CAPACITIES)

    def play(self) -> None:
        communication, verdict = self._communication, self.verdict
        combined = None
        for index, step in enumerate(self._steps):
            result = step.dispatch(communication)
            if combined is not None:  # judged only now: the dispatch follows the combine at once
                verdict.judge_sums(index - 1, combined, self._steps[index - 1].sums)
            verdict.judge_received(index, result, step.received)
            partial = partial_rows(
                communication.params, communication.ep_size, communication.ep_rank, result
            )
            in_place = result.hidden_states.copy_(partial)
            self._delays.maybe(0.4, 20, 300)
            combined = communication.combine(in_place)
        assert combined is not None
        verdict.judge_sums(len(self._steps) - 1, combined, self._steps[-1].sums)


def play_in_place(context: RankContext, backend: str, hidden_size: int, times: int) -> None:
    """Body: `times` times all capacities, eagerly; then as often from one graph."""
    params = MoEEpCommParams(24, 4, max(CAPACITIES), hidden_size)
    with create(context, params, backend) as communication:
        rounds = InPlaceRounds(communication, Delays(context.rank, communication.device))
        for _ in range(times):
            rounds.play()
        communication.check()
        rounds.verdict.require()
        recorded = Recorded(communication.device, rounds.play)
        delays = Delays(100 + context.rank, communication.device)
        for _ in range(times):
            delays.maybe(0.5, 50, 500)
            recorded.replay()
        communication.check()
        rounds.verdict.require()


@on_each(having="zero_copy", devices=EVERYWHERE)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_rows_are_staged_before_a_fast_peer_sends_its_next_ones(
    ranks: RunOnRanks, backend: Backend, device: str, size: int
) -> None:
    on_cpu = device == CPU
    ranks(
        size,
        play_in_place,
        device=device,
        backend=backend.name,
        hidden_size=64 if on_cpu else 2048,
        times=2 if on_cpu else 40,
        seconds=60,
    )
