"""Does a CUDA graph that was captured before a checkpoint replay after it with exact results?"""

from __future__ import annotations

import pytest

from moe_ep import MoEEpCommParams
from tests.backends import Backend, on_shared_gpus
from tests.conftest import RunOnRanks
from tests.gpu.captured_rounds import CapturedRound, play_eagerly, sent_by_all
from tests.gpu.device_rounds import Verdict
from tests.ranks import RankContext
from tests.rounds import create

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(24, 4, 160, 1000)
CAPACITIES = (8, 160)  # packets, and bulk copies
CYCLES = 3
REPLAYS = 5


def replay_after_checkpoints(context: RankContext, backend: str, objects: int) -> None:
    """Body: graphs of one or two objects of a workspace, replayed before and after checkpoints."""
    size = context.size
    communications = [create(context, PARAMS, backend) for _ in range(objects)]
    device = communications[0].device
    captured = [
        (communication, capacity, CapturedRound(communication, capacity, capacity))
        for communication in communications
        for capacity in CAPACITIES
    ]
    stamp = 1
    for cycle in range(CYCLES + 1):
        rounds = REPLAYS * len(captured)
        verdict = Verdict(PARAMS, size, context.rank, rounds, device)
        eager_verdict = Verdict(PARAMS, size, context.rank, 2, device)
        for index in range(rounds):
            communication, capacity, graph = captured[index % len(captured)]
            counts = [capacity] * size
            valid = [(capacity - source - index) % (capacity + 1) for source in range(size)]
            graph.replay(verdict, index, sent_by_all(communication, stamp, counts, valid))
            stamp += 1
        if cycle % 2 == 0:  # else the graphs alone begin after the restore
            play_eagerly(communications[0], eager_verdict, 0, [7] * size, 8)
            play_eagerly(communications[-1], eager_verdict, 1, [150] * size, 160)
        communications[0].checkpoint_prepare()
        assert all(one.workspace_bytes == 0 for one in communications)
        verdict.require()
        eager_verdict.require()
        communications[-1].checkpoint_restore()
    for one in communications:
        one.destroy()


@on_shared_gpus
@pytest.mark.parametrize("objects", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_a_graph_captured_before_a_checkpoint_is_exact_after_it(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, objects: int
) -> None:
    ranks(
        size,
        replay_after_checkpoints,
        device=device,
        seconds=60,
        backend=backend.name,
        objects=objects,
    )
