"""Are sums exact whose rows lie where something else is written: the sums, or a peer's next rows?

Steps of all sizes, one behind the other with random delays, so that a rank that reads late meets
what a fast one writes early.
"""

from __future__ import annotations

import pytest
import torch

from moe_ep import MoEEpCommParams, MoEEpCommunication
from tests.backends import EVERYWHERE, Backend, on_each
from tests.conftest import RunOnRanks
from tests.gpu.device_rounds import Verdict, partial_rows
from tests.gpu.recorded import Delays, Step
from tests.ranks import RankContext
from tests.ranks.devices import CPU
from tests.rounds import create

pytestmark = pytest.mark.multirank
# A step of few tokens goes back as packets. What follows is larger, so that its rows are sent in
# place, and blocks move: a source writes into what was another's block.
CAPACITIES = (4, 64, 8, 200, 2, 40, 9, 160, 3, 33, 1, 130)


def combine_in_place(
    communication: MoEEpCommunication, step: Step, delays: Delays, where: str
) -> torch.Tensor:
    """Play a round and return its sums.

    where: "received": the experts write over what they received. "output": the sums go where
        the last of the experts' rows lie.
    """
    result = step.dispatch(communication)
    partial = partial_rows(
        communication.params, communication.ep_size, communication.ep_rank, result
    )
    delays.maybe(0.4, 20, 300)
    if where == "received":
        return communication.combine(result.hidden_states.copy_(partial))
    num_tokens = len(step.mine.topk_ids)
    return communication.combine(partial, output=partial[len(partial) - num_tokens :])


def play_overlapping(
    context: RankContext,
    backend: str,
    params: MoEEpCommParams,
    where: str,
    times: int,
    low_precision: bool = False,
) -> None:
    """Body: all capacities, `times` times."""
    options = {"use_low_precision_combine": True} if low_precision else {}
    with create(context, params, backend, **options) as communication:
        size = communication.ep_size
        delays = Delays(context.rank, communication.device)
        steps = [
            Step.of(
                communication,
                stamp,
                [most - source % 2 for source in range(size)],
                most,
                low_precision=low_precision,
            )
            for stamp, most in enumerate(CAPACITIES)
        ]
        verdict = Verdict(params, size, context.rank, len(steps), communication.device)
        for _ in range(times):
            sums = [combine_in_place(communication, step, delays, where).clone() for step in steps]
            for index, step in enumerate(steps):
                verdict.judge_sums(index, sums[index], step.sums)
        communication.check()
        verdict.require()


@on_each(having="workspace", devices=EVERYWHERE)
@pytest.mark.parametrize("where", ["received", "output"])
@pytest.mark.parametrize("hidden_size", [64, 37])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_no_row_is_overwritten_before_it_is_read(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, hidden_size: int, where: str
) -> None:
    ranks(
        size,
        play_overlapping,
        device=device,
        backend=backend.name,
        params=MoEEpCommParams(24, 4, max(CAPACITIES), hidden_size),
        where=where,
        times=1 if device == CPU else 30,
        seconds=60,
    )


@on_each(having="low_precision", devices=EVERYWHERE)
@pytest.mark.parametrize("where", ["received", "output"])
@pytest.mark.parametrize("size", [2, 8])
def test_no_row_is_overwritten_before_it_is_quantised(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, where: str
) -> None:
    ranks(
        size,
        play_overlapping,
        device=device,
        backend=backend.name,
        params=MoEEpCommParams(24, 4, max(CAPACITIES), 1160),
        where=where,
        times=1 if device == CPU else 30,
        low_precision=True,
        seconds=60,
    )
