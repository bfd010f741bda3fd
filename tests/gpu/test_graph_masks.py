"""Does a captured round follow a rank mask in device memory that changes between replays?"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from moe_ep import MoEEpCommParams
from moe_ep.cake.kernels import active_rank_mask
from tests.backends import EVERYWHERE, Backend, on_each
from tests.conftest import RunOnRanks
from tests.gpu.device_rounds import Received, Verdict, expected_sums, partial_rows, tokens_of
from tests.gpu.recorded import Recorded
from tests.ranks import RankContext
from tests.ranks.devices import CPU
from tests.rounds import create

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(26, 4, 160, 1000)


def replay_with_masks(
    context: RankContext,
    backend: str,
    masks: Sequence[Sequence[int]],
    num_tokens: int,
    replays: int,
) -> None:
    """Body: replay one graph so often with each mask; a rank stops when it is masked off."""
    rank, size = context.rank, context.size
    with create(context, PARAMS, backend, enable_rank_mask=True) as communication:
        device = communication.device
        mask = active_rank_mask(range(size), size, device)
        mine = tokens_of(PARAMS, 0, rank, num_tokens, device)
        verdict = Verdict(PARAMS, size, rank, len(masks) * replays, device)
        got: list[tuple[Received, Tensor]] = []

        def play() -> None:
            result = communication.dispatch(  # type: ignore[call-arg]
                mine.hidden_states,
                mine.topk_ids,
                mine.topk_weights,
                runtime_max_tokens_per_rank=num_tokens,
                active_rank_mask=mask,
            )
            partial = partial_rows(PARAMS, size, rank, result)
            received = Received.copied(result)
            combined = communication.combine(  # type: ignore[call-arg]
                partial, active_rank_mask=mask
            )
            got[:] = [(received, combined)]

        play()
        communication.check()
        recorded = Recorded(device, play)
        for index, active in enumerate(masks):
            if rank in active:
                mask.copy_(active_rank_mask(active, size, device))
                for stamp in range(1 + index * replays, 1 + (index + 1) * replays):
                    # What a rank that is masked off would send is as good as nothing.
                    sent = [
                        tokens_of(
                            PARAMS,
                            stamp,
                            source,
                            num_tokens,
                            device,
                            valid=None if source in active else 0,
                        )
                        for source in range(size)
                    ]
                    mine.copy_(sent[rank])
                    recorded.replay()
                    received, combined = got[0]
                    verdict.judge_dispatch(stamp - 1, received, sent)
                    wanted = expected_sums(PARAMS, size, mine, active_ranks=active)
                    verdict.judge_sums(stamp - 1, combined, wanted)
                communication.check()
            # Nobody may be masked off who has still to read what it got.
            context.barrier()
        verdict.require()


@on_each(having="masks", devices=EVERYWHERE)
@pytest.mark.parametrize(
    "masks",
    [
        [[0, 1], [1]],
        [[0, 1, 2, 3], [0, 2, 3], [0, 3], [0]],
        [[*range(8)], [0, 1, 3, 4, 5, 6, 7], [0, 1, 6, 7], [1, 6]],
    ],
    ids=lambda masks: f"{len(masks[0])} ranks",
)
@pytest.mark.parametrize("num_tokens", [5, 160])
def test_a_captured_round_follows_the_mask(
    ranks: RunOnRanks, backend: Backend, device: str, masks: list[list[int]], num_tokens: int
) -> None:
    ranks(
        len(masks[0]),
        replay_with_masks,
        device=device,
        backend=backend.name,
        masks=masks,
        num_tokens=num_tokens,
        replays=2 if device == CPU else 10,
        seconds=60,
    )
