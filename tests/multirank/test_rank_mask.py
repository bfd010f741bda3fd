"""Does a round go on without the ranks that are masked off?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from moe_ep import BootstrapConfig, MoEEpCommParams, create_communication
from moe_ep.cake.kernels import active_rank_mask
from tests.backends import ALL, Backend, on_each
from tests.bits import assert_same_bits
from tests.conftest import RunOnRanks
from tests.ranks import RankContext
from tests.rounds import Played, Round, check, create, play, play_round, random_round

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(10, 4, 7, 24)
MASKED = {"enable_rank_mask": True, "eplb_stats_num_experts": 5}
with_masks = on_each(having="masks")


def play_without(
    context: RankContext, backend: str, rounds: Sequence[Round], **options: bool
) -> list[Played] | None:
    """Body: play the rounds, whose masks grow smaller; who is masked off sits by. Nobody may be so
    who has still to read what it got."""
    played = []
    with create(context, PARAMS, backend, **MASKED, **options) as communication:
        for one in rounds:
            if one.active_ranks is None or context.rank in one.active_ranks:
                played.append(play_round(communication, one))
            context.barrier()
    return played


def masked_round(active: Sequence[int], seed: int, size: int) -> Round:
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 8, (size,), generator=g).tolist()
    stats = torch.randint(0, 1000, (size, 5), generator=g).to(torch.int32)
    one = random_round(PARAMS, counts, seed)
    # On a GPU the mask may be in either memory.
    return replace(
        one,
        active_ranks=list(active),
        eplb_local_stats=list(stats),
        mask_on_device=seed % 2 == 0,
    )


@with_masks
@pytest.mark.parametrize(
    ("size", "active"), [(2, [0]), (2, [1]), (4, [0, 2, 3]), (4, [1, 2]), (8, [0, 1, 3, 6, 7])]
)
def test_active_ranks_play_on_without_the_others(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, active: list[int]
) -> None:
    everyone = list(range(size))
    rounds = [
        masked_round(everyone, 1, size),
        *[masked_round(active, seed, size) for seed in (2, 3, 4)],
    ]
    results = ranks(size, play_without, device=device, backend=backend.name, rounds=rounds)
    for index, one in enumerate(rounds):
        check(
            PARAMS,
            one,
            [
                results[rank][index] if rank in (one.active_ranks or ()) else None
                for rank in everyone
            ],
        )


def lose_one_rank_after_another(
    ranks: RunOnRanks, backend: Backend, device: str, *, low_precision: bool, **options: bool
) -> None:
    masks = [[0, 1, 2, 3], [0, 1, 3], [1, 3], [3]]
    rounds = [masked_round(mask, seed, 4) for seed, mask in enumerate(masks)]
    results = ranks(4, play_without, device=device, backend=backend.name, rounds=rounds, **options)
    for index, one in enumerate(rounds):
        played = [results[r][index] if r in masks[index] else None for r in range(4)]
        check(PARAMS, one, played, low_precision=low_precision)


@with_masks
def test_a_mask_may_lose_one_rank_after_another(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    lose_one_rank_after_another(ranks, backend, device, low_precision=False)


@on_each(having="low_precision")
def test_a_mask_may_lose_one_rank_after_another_in_low_precision(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    options = {"use_low_precision_combine": True}
    lose_one_rank_after_another(ranks, backend, device, low_precision=True, **options)


@with_masks
def test_the_full_mask_is_no_mask(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    masked = masked_round([0, 1, 2], 5, 3)
    rounds = [masked, replace(masked, active_ranks=None)]
    results = ranks(
        3,
        play,
        device=device,
        backend=backend.name,
        params=PARAMS,
        rounds=rounds,
        options=MASKED,
    )
    for rank, (with_mask, without) in enumerate(results):
        assert_same_bits(with_mask.topk_ids, without.topk_ids, rank=rank)
        assert_same_bits(with_mask.recv_token_counts, without.recv_token_counts, rank=rank)
        assert_same_bits(with_mask.combined, without.combined, rank=rank)
    for index, one in enumerate(rounds):
        check(PARAMS, one, [results[rank][index] for rank in range(3)])


def give_masks(
    context: RankContext, backend: str, masks: Sequence[torch.Tensor], options: dict[str, bool]
) -> list[tuple[str, str]]:
    """Body: what a dispatch with each of the masks raises; then a good round."""
    problems = []
    one = random_round(PARAMS, (2, 2), seed=1)
    with create(context, PARAMS, backend, **options) as communication:
        for mask in masks:
            try:
                communication.dispatch(  # type: ignore[call-arg]
                    one.hidden_states[context.rank].to(communication.device),
                    one.topk_ids[context.rank].to(communication.device),
                    active_rank_mask=mask,
                )
            except Exception as raised:
                problems.append((type(raised).__name__, str(raised)))
        play_round(communication, one)
    return problems


@with_masks
def test_a_wrong_mask_is_refused_before_anything_is_sent(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    masks = [
        torch.tensor([3], dtype=torch.int64),
        torch.zeros(2, dtype=torch.uint64),
        torch.zeros(1, dtype=torch.uint64),
    ]
    results = ranks(
        2,
        give_masks,
        device=device,
        backend=backend.name,
        masks=masks,
        options={"enable_rank_mask": True},
    )
    for problems in results:
        assert [name for name, _ in problems] == [
            "TypeError",
            "MoEEpConfigError",
            "MoEEpConfigError",
        ]
        assert all("mask" in message for _, message in problems)


@with_masks
def test_a_mask_that_was_not_enabled_is_refused(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    masks = [active_rank_mask([0, 1], 2)]
    results = ranks(2, give_masks, device=device, backend=backend.name, masks=masks, options={})
    for problems in results:
        ((name, message),) = problems
        assert name == "MoEEpConfigError"
        assert "enable_rank_mask" in message


@pytest.mark.parametrize("backend", [one.name for one in ALL if not one.masks])
def test_a_backend_without_masks_refuses_them(backend: str) -> None:
    bootstrap = BootstrapConfig(1, 0, device="cpu")
    with pytest.raises(TypeError, match=f"{backend}.*no option enable_rank_mask"):
        create_communication(bootstrap, PARAMS, backend, enable_rank_mask=True)
    one, mask = random_round(PARAMS, (2,), seed=1), active_rank_mask([0], 1)
    given = one.hidden_states[0], one.topk_ids[0]
    with create_communication(bootstrap, PARAMS, backend) as communication:
        with pytest.raises(TypeError, match="active_rank_mask"):
            communication.dispatch(*given, active_rank_mask=mask)  # type: ignore[call-arg]
        play_round(communication, one)


def test_bit_i_of_the_mask_is_rank_i() -> None:
    assert active_rank_mask([0, 3], 4).tolist() == [0b1001]
    assert active_rank_mask([0, 63, 64, 129], 130).tolist() == [1 + 2**63, 1, 2]
    assert active_rank_mask([0], 64).shape == (1,)
    assert active_rank_mask([0], 65).shape == (2,)
    assert active_rank_mask(range(256), 256).tolist() == [2**64 - 1] * 4
    assert active_rank_mask([1], 4).dtype == torch.uint64


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_mask_of_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=str(rank)):
        active_rank_mask([0, rank], 4)
