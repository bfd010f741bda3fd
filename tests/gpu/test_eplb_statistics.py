"""Do statistics reach all ranks whatever way a step goes, also where nobody has a token?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_ep import MoEEpCommParams, _native
from moe_ep._native import Geometry
from tests.backends import USUAL, Backend, on_each
from tests.bits import assert_same_bits
from tests.conftest import RunOnRanks
from tests.gpu.bare_workspace import bare_workspace
from tests.gpu.device_rounds import Verdict, expected_sums, tokens_of
from tests.ranks import RankContext
from tests.rounds import Round, check_all, play, random_round

pytestmark = pytest.mark.multirank
TOP_K = 8
NUM_STATS = 23  # neither whole packets nor whole chunks


def stats_of(size: int, seed: int) -> list[Tensor]:
    """[NUM_STATS] int32 of each rank, of all bit patterns."""
    g = torch.Generator().manual_seed(seed)
    return list(torch.randint(-(2**31), 2**31, (size, NUM_STATS), generator=g).to(torch.int32))


def step(params: MoEEpCommParams, size: int, seed: int, most: int, with_stats: bool) -> Round:
    counts = [max(most - source % 3, 0) for source in range(size)]
    one = random_round(params, counts, seed, tokens_per_rank=most)
    return replace(one, eplb_local_stats=stats_of(size, seed)) if with_stats else one


@on_each(having="statistics", devices=USUAL)
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("max_tokens", [1, 8, 40])
def test_steps_without_a_token_bring_statistics_between_steps_of_any_size(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, max_tokens: int
) -> None:
    params = MoEEpCommParams(24, TOP_K, max_tokens, 72)
    few = _native.low_latency_tokens(size, TOP_K, max_tokens)
    mosts = [0, few, 0, 0, min(few + 1, max_tokens), 0, max_tokens, 0, 1, 0]
    rounds = [
        step(params, size, seed, most, with_stats=seed not in (3, 9))
        for seed, most in enumerate(mosts)
    ]
    played = ranks(
        size,
        play,
        device=device,
        backend=backend.name,
        params=params,
        rounds=rounds,
        options={"eplb_stats_num_experts": NUM_STATS},
        seconds=60,
    )
    check_all(params, rounds, played)


def play_bare(context: RankContext, backend: str, low_latency_tokens: int) -> list[list[Tensor]]:
    """Body: rounds with and without tokens; return the statistics that came in each."""
    rank, size, device = context.rank, context.size, torch.device(context.device)
    params = MoEEpCommParams(24, TOP_K, 40, 72)
    geometry = Geometry(
        ep_size=size,
        num_experts=params.num_experts,
        top_k=params.top_k,
        max_tokens_per_rank=params.max_tokens_per_rank,
        dispatch_bytes_per_token=params.dispatch_bytes_per_token,
        combine_bytes_per_token=params.combine_bytes_per_token,
        eplb_stats_num_experts=NUM_STATS,
        low_latency_tokens=low_latency_tokens,
    )
    verdict = Verdict(params, size, rank, len(BARE_CAPACITIES), device)
    gathered = []
    with bare_workspace(context, backend, geometry.segment_bytes) as workspace:
        workspace.start(geometry)
        for index, most in enumerate(BARE_CAPACITIES):
            sent = [tokens_of(params, index, source, most, device) for source in range(size)]
            received, combined, stats = workspace.play(
                params,
                sent[rank],
                most,
                zero_copy=False,
                eplb_local_stats=stats_of(size, index)[rank].to(device),
            )
            verdict.judge_dispatch(index, received, sent)
            verdict.judge_sums(index, combined, expected_sums(params, size, sent[rank]))
            assert stats is not None
            gathered.append(list(stats.cpu()))
        workspace.settle()
        verdict.require()
    return gathered


BARE_CAPACITIES = (0, 3, 0, 0, 40, 0, 9)


@on_each(having="one_sided", devices=USUAL)
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("low_latency_tokens", [0, 1, 8])
def test_statistics_travel_whether_or_not_few_tokens_have_a_way_of_their_own(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, low_latency_tokens: int
) -> None:
    for rank, gathered in enumerate(
        ranks(
            size,
            play_bare,
            device=device,
            backend=backend.name,
            low_latency_tokens=low_latency_tokens,
            seconds=60,
        )
    ):
        assert len(gathered) == len(BARE_CAPACITIES)
        for index, stats in enumerate(gathered):
            wanted = torch.stack(stats_of(size, index))
            assert_same_bits(torch.stack(stats), wanted, rank=rank, what=f"round {index}")
