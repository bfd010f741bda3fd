"""Are steps exact whichever transport takes them, also where their words look like its flags?

On the CPU there is one transport; there the options must change nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import MoEEpCommParams
from moe_ep.reference import reference_combine
from tests.backends import Backend, on_each
from tests.bits import assert_same_bits
from tests.conftest import RunOnRanks
from tests.gpu_cases import few_on_gpus
from tests.ranks import RankContext
from tests.ranks.devices import CPU, ONE_GPU, SPREAD
from tests.rounds import check_all, create, ids_of, play, random_round, settled

pytestmark = pytest.mark.multirank
everywhere = on_each(having="lamport", devices=(CPU, ONE_GPU, SPREAD))
OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "always": {"lamport": True},
    "never": {"lamport": False},
    "usual up to 5": {"lamport_max_tokens": 5},
    "always up to 5": {"lamport": True, "lamport_max_tokens": 5},
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


@everywhere
@options
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@few_on_gpus(size=[2, 8])
def test_steps_on_both_sides_of_every_limit_are_exact(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, options: dict[str, Any]
) -> None:
    params = MoEEpCommParams(24, 8, 130, 200)
    rounds = [
        random_round(params, [most - rank % 2 for rank in range(size)], most, tokens_per_rank=most)
        for most in (1, 5, 6, 8, 9, 16, 31, 32, 33, 130, 32, 4)
    ]
    played = ranks(
        size,
        play,
        device=device,
        backend=backend.name,
        params=params,
        rounds=rounds,
        options=options,
    )
    check_all(params, rounds, played)


TOKENS, HIDDEN, ROUNDS = 8, 96, 60
# A packet's flag is the number of the round, which begins with 1; a slot keeps old packets.
SPECIAL = (0, -1, -(2**31), 2**31 - 1, 0x7F800000, 0x7F800001, 0x7FC00000, -(2**22), -1 - 2**22)


def words_of(index: int, rank: int, count: int) -> Tensor:
    """[count, HIDDEN] int32 of a round: numbers of the rounds around it, and special ones."""
    g = torch.Generator().manual_seed(1000 * index + rank)
    near = torch.arange(index - 2, index + 4)
    choice = torch.cat([near, torch.tensor(SPECIAL)])
    return choice[torch.randint(0, len(choice), (count, HIDDEN), generator=g)].to(torch.int32)


def send_words(
    context: RankContext, backend: str, options: dict[str, Any]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Body: rows, weights and experts' rows that are words; return what came in each round.

    Each token goes to the next rank, which answers with words of its own.
    """
    rank, size = context.rank, context.size
    params = MoEEpCommParams(size, 1, TOKENS, HIDDEN, torch.float32)
    came = []
    with create(context, params, backend, **options) as communication:

        def on_device(words: Tensor) -> Tensor:
            return words.view(torch.float32).to(communication.device)

        ids = ids_of([[(rank + 1) % size]] * TOKENS, 1).to(communication.device)
        for index in range(ROUNDS):
            sent = words_of(index, rank, TOKENS)
            weights = on_device(sent[:, :1].contiguous())
            result = communication.dispatch(on_device(sent), ids, weights)
            assert result.topk_weights is not None
            rows = result.hidden_states.cpu().view(torch.int32).clone()
            got_weights = result.topk_weights.cpu().view(torch.int32).clone()
            answer = on_device(words_of(index, size + rank, size * TOKENS))
            sums = settled(communication, communication.combine, answer)
            came.append((rows, got_weights, sums.cpu().clone()))
    return came


@everywhere
@options
@pytest.mark.parametrize("size", [2, 8])
def test_words_that_look_like_flags_arrive_unchanged(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, options: dict[str, Any]
) -> None:
    params = MoEEpCommParams(size, 1, TOKENS, HIDDEN, torch.float32)
    all_ids = [ids_of([[(rank + 1) % size]] * TOKENS, 1) for rank in range(size)]
    came = ranks(size, send_words, device=device, backend=backend.name, options=options)
    for index in range(ROUNDS):
        answers = [
            words_of(index, size + rank, size * TOKENS).view(torch.float32) for rank in range(size)
        ]
        wanted = reference_combine(params, size, all_ids, answers, tokens_per_rank=TOKENS)
        for rank in range(size):
            rows, weights, sums = came[rank][index]
            source = (rank - 1) % size
            block = slice(source * TOKENS, (source + 1) * TOKENS)
            sent = words_of(index, source, TOKENS)
            assert_same_bits(rows[block], sent, rank=rank, what=f"rows of round {index}")
            assert_same_bits(weights[block], sent[:, :1], rank=rank, what=f"weights of {index}")
            assert_same_bits(sums, wanted[rank], rank=rank, what=f"sums of round {index}")
