"""Rounds that are made and judged on the device, so that the host does not wait in them.

What a rank sends follows from a stamp and its rank alone: every rank can make every other's tokens,
and knows what must arrive and what must come back. Nothing here synchronises but `Verdict.require`.
The numbers are those of moe_ep.reference (tests/gpu/test_device_rounds.py compares them).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from moe_ep import MoEEpCommParams, expert_partition
from moe_ep.quantization import dequantize_fp8, quantize_to_fp8
from moe_ep.reference import ReceivedRows

_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32}
_MULTIPLIERS = (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)
_WHAT = ("rows", "ids", "weights", "counts", "sums")


@dataclass(frozen=True)
class Tokens:
    """What one rank sends.

    hidden_states: [n, hidden_size]; topk_ids: [n, top_k] int32; topk_weights: [n, top_k] float32.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor

    def copy_(self, other: Tokens) -> None:
        """Take another's values into the same memory."""
        self.hidden_states.copy_(other.hidden_states)
        self.topk_ids.copy_(other.topk_ids)
        self.topk_weights.copy_(other.topk_weights)


def tokens_of(
    params: MoEEpCommParams,
    stamp: int,
    rank: int,
    num_tokens: int,
    device: torch.device | str,
    *,
    valid: int | None = None,
) -> Tokens:
    """Return the tokens that a rank sends under a stamp; other stamps give other tokens.

    valid: from this row on all ids are padding; None: none, but for some slots everywhere.
    """

    def noise(columns: int, salt: int) -> Tensor:
        """[num_tokens, columns] of 31 bits each."""
        key = ((stamp * 4 + salt) * 257 + rank) << 26
        value = torch.arange(num_tokens * columns, dtype=torch.int64, device=device) + key
        for factor in _MULTIPLIERS:
            value = value * factor
            value = value ^ (value >> 31)
        return (value & 0x7FFFFFFF).view(num_tokens, columns)

    hidden_states = (((noise(params.hidden_size, 0) >> 11) & 0x1FF) - 256).float() / 64
    picks = noise(params.top_k, 1)
    ids = torch.where(picks & 0xF == 0, -1, (picks >> 4) % params.num_experts)
    if valid is not None:
        ids[valid:] = params.invalid_expert_id
    return Tokens(
        hidden_states.to(params.token_dtype),
        ids.int(),
        (noise(params.top_k, 2) >> 8).float() / 2**23,
    )


def owned_slots(params: MoEEpCommParams, ep_size: int, rank: int, topk_ids: Tensor) -> Tensor:
    """Bool, shaped as topk_ids: the slots whose expert lives on `rank`."""
    first, count = expert_partition(params.num_experts, ep_size, rank)
    return (topk_ids >= first) & (topk_ids < first + count)


def apply_experts(
    params: MoEEpCommParams,
    ep_size: int,
    rank: int,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
) -> Tensor:
    """[rows, hidden_size]: the partial rows of a rank's experts e(x) = (number of e + 1) * x."""
    tokens = hidden_states.float()
    total = torch.zeros_like(tokens)
    own = owned_slots(params, ep_size, rank, topk_ids)
    for slot in range(params.top_k):
        value = (topk_ids[:, slot] + 1).float()[:, None] * tokens
        if topk_weights is not None:
            value = value * topk_weights[:, slot, None]
        total = total + torch.where(own[:, slot, None], value, 0.0)
    return total.to(params.token_dtype)


def partial_rows(
    params: MoEEpCommParams, ep_size: int, rank: int, received: ReceivedRows
) -> Tensor:
    """[ep_size * tokens_per_rank, hidden_size] for combine; NaN in rows without a token."""
    partial = apply_experts(
        params,
        ep_size,
        rank,
        received.hidden_states,
        received.topk_ids,
        received.topk_weights,
    )
    empty = ~_with_token(received.recv_token_counts, received.tokens_per_rank)
    return partial.masked_fill_(empty[:, None], float("nan"))


def expected_sums(
    params: MoEEpCommParams,
    ep_size: int,
    tokens: Tokens,
    *,
    with_weights: bool = True,
    active_ranks: Sequence[int] | None = None,
    low_precision: bool = False,
) -> Tensor:
    """[n, hidden_size]: what combine returns to the rank that sent the tokens.

    active_ranks: those that are not masked off; None: all.
    low_precision: with use_low_precision_combine.
    """
    weights = tokens.topk_weights if with_weights else None
    total = torch.zeros_like(tokens.hidden_states, dtype=torch.float32)
    for owner in range(ep_size) if active_ranks is None else sorted(active_ranks):
        rows = apply_experts(
            params, ep_size, owner, tokens.hidden_states, tokens.topk_ids, weights
        ).float()
        total = total + (dequantize_fp8(*quantize_to_fp8(rows)) if low_precision else rows)
    return total.to(params.token_dtype)


@dataclass(frozen=True)
class Received:
    """What a dispatch brings to one rank, as in MoEEpDispatchResult."""

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    tokens_per_rank: int
    recv_token_counts: Tensor

    @classmethod
    def copied(cls, result: ReceivedRows) -> Received:
        """Return what came, with weights, apart from library memory, which is the combine's next.

        A peer may be in its next dispatch before this is read.
        """
        assert result.topk_weights is not None
        return cls(
            hidden_states=result.hidden_states.clone(),
            topk_ids=result.topk_ids.clone(),
            topk_weights=result.topk_weights.clone(),
            tokens_per_rank=result.tokens_per_rank,
            recv_token_counts=result.recv_token_counts.clone(),
        )


def received_by(
    params: MoEEpCommParams,
    ep_size: int,
    rank: int,
    tokens_per_rank: int,
    sent: Sequence[Tokens],
) -> Received:
    """Return what must come to a rank; rows and weights without a token are zero.

    sent: the tokens of every rank.
    """
    blocks = [_block_of(params, ep_size, rank, tokens_per_rank, tokens) for tokens in sent]
    rows, ids, weights, counts = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return Received(rows, ids, weights, tokens_per_rank, counts)


def _block_of(
    params: MoEEpCommParams, ep_size: int, rank: int, tokens_per_rank: int, tokens: Tokens
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, ids and weights [tokens_per_rank, *] of one source, and how many of them, [1]."""
    goes = owned_slots(params, ep_size, rank, tokens.topk_ids).any(dim=1)
    count = goes.sum(dtype=torch.int32)[None]
    # The tokens that do not come here end up in a row behind the last.
    place = torch.where(goes, goes.cumsum(0) - 1, tokens_per_rank)
    filled = (torch.arange(tokens_per_rank, device=place.device) < count)[:, None]

    def compact(values: Tensor) -> Tensor:
        rows = values.new_zeros(tokens_per_rank + 1, values.shape[1])
        return rows.index_copy_(0, place, values)[:tokens_per_rank]

    names = (tokens.topk_ids >= 0) & (tokens.topk_ids < params.num_experts)
    ids = compact(torch.where(names, tokens.topk_ids, params.invalid_expert_id))
    ids = torch.where(filled, ids, params.invalid_expert_id)
    return compact(tokens.hidden_states), ids, compact(tokens.topk_weights), count


class Verdict:
    """Counts, on the device, the elements of each round that are not what they must be."""

    def __init__(
        self, params: MoEEpCommParams, ep_size: int, rank: int, rounds: int, device: torch.device
    ) -> None:
        self._params = params
        self._ep_size = ep_size
        self._rank = rank
        self._wrong = torch.zeros(rounds, len(_WHAT), dtype=torch.int64, device=device)

    def judge_dispatch(self, index: int, received: ReceivedRows, sent: Sequence[Tokens]) -> None:
        """Judge what came in round `index`. sent: the tokens of every rank."""
        capacity = received.tokens_per_rank
        wanted = received_by(self._params, self._ep_size, self._rank, capacity, sent)
        self.judge_received(index, received, wanted)

    def judge_received(self, index: int, received: ReceivedRows, wanted: Received) -> None:
        """Judge what came in round `index`, where what must come is known already."""
        filled = _with_token(wanted.recv_token_counts, wanted.tokens_per_rank)[:, None]
        self._count(index, "ids", received.topk_ids != wanted.topk_ids)
        self._count(index, "counts", received.recv_token_counts != wanted.recv_token_counts)
        rows = _differ(received.hidden_states, wanted.hidden_states)
        self._count(index, "rows", rows & filled)
        if received.topk_weights is not None:
            weights = _differ(received.topk_weights, wanted.topk_weights)
            self._count(index, "weights", weights & filled)

    def judge_sums(self, index: int, combined: Tensor, wanted: Tensor) -> None:
        """Judge what combine returned in round `index`."""
        self._count(index, "sums", _differ(combined, wanted))

    def require(self) -> None:
        """Fail if anything was wrong so far, naming the first round and what was wrong in it."""
        wrong = self._wrong.cpu()
        bad = wrong.any(dim=1).nonzero().flatten().tolist()
        if bad:
            counts = dict(zip(_WHAT, wrong[bad[0]].tolist(), strict=True))
            raise AssertionError(
                f"rank {self._rank}: {len(bad)} rounds of {len(wrong)} are wrong; in the first, "
                f"round {bad[0]}, so many elements: {counts}"
            )

    def _count(self, index: int, what: str, wrong: Tensor) -> None:
        self._wrong[index, _WHAT.index(what)] += wrong.sum()


def capturing(
    graph: torch.cuda.CUDAGraph, device: torch.device, **options: Any
) -> AbstractContextManager[None]:
    """Return torch.cuda.graph on a stream of the device.

    torch's own stream for captures is made once in a process, on whatever device was current then;
    ranks of the pool come from one GPU to another.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return cast(AbstractContextManager[None], torch.cuda.graph(graph, stream=stream, **options))


def _with_token(counts: Tensor, tokens_per_rank: int) -> Tensor:
    """[ep_size * tokens_per_rank] bool: the received rows that hold a token."""
    return (torch.arange(tokens_per_rank, device=counts.device) < counts[:, None]).flatten()


def _differ(got: Tensor, wanted: Tensor) -> Tensor:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    integer = _INTEGER_OF_SIZE[got.element_size()]
    return got.contiguous().view(integer) != wanted.contiguous().view(integer)
