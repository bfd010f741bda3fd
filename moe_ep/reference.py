"""What do dispatch and combine mean? The whole exchange in plain torch, on the inputs of all ranks.

This is the oracle of the tests and the shortest exact statement of the contract. It shares no code
with the backends: it sees every rank's tensors as a list indexed by rank, and moves rows by
indexing. A round reads

    sent = reference_dispatch(params, ep_size, hidden_states, topk_ids, topk_weights)
    partial = [evaluate_experts(params, ep_size, rank, sent[rank]) for rank in range(ep_size)]
    combined = reference_combine(
        params, ep_size, topk_ids, partial, tokens_per_rank=sent[0].tokens_per_rank
    )

Everything here is exact: a backend must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_ep.params import MoEEpCommParams
from moe_ep.quantization import dequantize_fp8, quantize_to_fp8

Expert = Callable[[int, Tensor], Tensor]
"""From an expert's number and [rows, hidden_size] float32 to the same shape."""


class ReceivedRows(Protocol):
    """What a consumer reads of a dispatch's result, the oracle's or a backend's."""

    @property
    def hidden_states(self) -> Tensor: ...
    @property
    def topk_ids(self) -> Tensor: ...
    @property
    def topk_weights(self) -> Tensor | None: ...
    @property
    def tokens_per_rank(self) -> int: ...
    @property
    def recv_token_counts(self) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class ReferenceDispatch:
    """What one rank receives. Rows are rank-major: row `s * tokens_per_rank + i` is the i-th token
    that rank s sent here.

    hidden_states: [ep_size * tokens_per_rank, row], the rows as they were sent; rows without a
        token are zero here and unspecified in a backend.
    hidden_states_scale: [ep_size * tokens_per_rank, scale row] or None, likewise.
    topk_ids: [ep_size * tokens_per_rank, top_k] int32 global expert ids. A slot that names no
        expert, and every slot of a row without a token, is `invalid_expert_id`.
    topk_weights: [ep_size * tokens_per_rank, top_k] float32 or None; unspecified in rows without a
        token.
    recv_token_counts: [ep_size] int32, how many tokens came from each rank.
    eplb_gathered_stats: [ep_size, E'] int32 or None.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor | None
    hidden_states_scale: Tensor | None
    tokens_per_rank: int
    recv_token_counts: Tensor
    eplb_gathered_stats: Tensor | None


def expert_owners(num_experts: int, ep_size: int) -> Tensor:
    """[num_experts] int64: the rank of each expert. Contiguous blocks; the first `E % R` ranks own
    one expert more.
    """
    shares = [num_experts // ep_size + (rank < num_experts % ep_size) for rank in range(ep_size)]
    return torch.repeat_interleave(torch.arange(ep_size), torch.tensor(shares))


def names_an_expert(params: MoEEpCommParams, topk_ids: Tensor) -> Tensor:
    """Bool, shaped as topk_ids: the slots that send something. All others are padding or input
    errors.
    """
    return (topk_ids >= 0) & (topk_ids < params.num_experts)


def input_errors(params: MoEEpCommParams, topk_ids: Tensor) -> list[tuple[int, int, int]]:
    """The (token, slot, id) of every id that is neither an expert, nor negative, nor
    `invalid_expert_id`.
    """
    padding = (topk_ids < 0) | (topk_ids == params.invalid_expert_id)
    wrong = ~names_an_expert(params, topk_ids) & ~padding
    return [(token, slot, int(topk_ids[token, slot])) for token, slot in wrong.nonzero().tolist()]


def token_destinations(
    params: MoEEpCommParams,
    ep_size: int,
    topk_ids: Tensor,
    active_ranks: Collection[int] | None = None,
) -> Tensor:
    """[num_tokens, ep_size] bool: whether a token travels to a rank, once, however many of its
    experts live there.
    """
    valid = names_an_expert(params, topk_ids)
    owner = expert_owners(params.num_experts, ep_size)[torch.where(valid, topk_ids, 0).long()]
    nowhere = ep_size
    goes = torch.zeros(len(topk_ids), ep_size + 1, dtype=torch.bool)
    goes.scatter_(1, torch.where(valid, owner, nowhere), True)
    goes = goes[:, :nowhere]
    if active_ranks is not None:
        goes &= torch.tensor([rank in active_ranks for rank in range(ep_size)])
    return goes


def reference_dispatch(
    params: MoEEpCommParams,
    ep_size: int,
    hidden_states: Sequence[Tensor],
    topk_ids: Sequence[Tensor],
    topk_weights: Sequence[Tensor] | None = None,
    *,
    hidden_states_scale: Sequence[Tensor] | None = None,
    tokens_per_rank: int | None = None,
    active_ranks: Collection[int] | None = None,
    eplb_local_stats: Sequence[Tensor] | None = None,
) -> list[ReferenceDispatch]:
    """What every rank receives when rank s sends `hidden_states[s]`, and so on for each argument.

    tokens_per_rank: the capacity for each source; None means `params.max_tokens_per_rank`.
    active_ranks: the ranks that take part; None means all. The others send nothing, receive
        nothing, and their result shows an exchange without tokens. Their statistics are zero.
    """

    def takes_part(rank: int) -> bool:
        return active_ranks is None or rank in active_ranks

    capacity = params.max_tokens_per_rank if tokens_per_rank is None else tokens_per_rank
    goes = [
        token_destinations(params, ep_size, ids, active_ranks if takes_part(source) else ())
        for source, ids in enumerate(topk_ids)
    ]
    counts = torch.stack([of_source.sum(dim=0) for of_source in goes], dim=1).int()

    def received(rank: int, rows_of: Sequence[Tensor], empty_value: int) -> Tensor:
        """[ep_size * capacity, *]: the chosen rows of every source, compact and in token order, in
        its own block.
        """
        shape = (ep_size, capacity, *rows_of[rank].shape[1:])
        blocks = torch.zeros(shape, dtype=rows_of[rank].dtype)
        if empty_value:
            blocks.fill_(empty_value)
        for source in counts[rank].nonzero().flatten().tolist():
            chosen = rows_of[source][goes[source][:, rank]]
            blocks[source, : len(chosen)] = chosen
        return blocks.flatten(0, 1)

    travelling_ids = [
        torch.where(names_an_expert(params, ids), ids, params.invalid_expert_id).int()
        for ids in topk_ids
    ]
    stats = None
    if eplb_local_stats is not None:
        stats = torch.stack(
            [
                s if takes_part(rank) else torch.zeros_like(s)
                for rank, s in enumerate(eplb_local_stats)
            ]
        )
    return [
        ReferenceDispatch(
            hidden_states=received(rank, hidden_states, 0),
            topk_ids=received(rank, travelling_ids, params.invalid_expert_id),
            topk_weights=None if topk_weights is None else received(rank, topk_weights, 0),
            hidden_states_scale=(
                None if hidden_states_scale is None else received(rank, hidden_states_scale, 0)
            ),
            tokens_per_rank=capacity,
            recv_token_counts=counts[rank].clone(),
            eplb_gathered_stats=stats,
        )
        for rank in range(ep_size)
    ]


def reference_combine(
    params: MoEEpCommParams,
    ep_size: int,
    topk_ids: Sequence[Tensor],
    expert_outputs: Sequence[Tensor],
    *,
    tokens_per_rank: int,
    active_ranks: Collection[int] | None = None,
    output_dtype: torch.dtype | None = None,
    use_low_precision_combine: bool = False,
) -> list[Tensor]:
    """[n, hidden_size] for each rank: every token's partial rows, summed where the token came from.

    topk_ids: what was given to dispatch; it alone decides which rows count. Rows without a token
        are never read, so a NaN in one changes nothing.
    expert_outputs: [ep_size * tokens_per_rank, hidden_size] of each rank, one partial row in the
        place of each received one. A rank that does not take part needs only an entry.
    use_low_precision_combine: every row, wherever it lies, travels as
        `moe_ep.quantization.quantize_to_fp8` stores it.
    """

    def travelled(rows: Tensor) -> Tensor:
        """The float32 numbers that the source adds."""
        return dequantize_fp8(*quantize_to_fp8(rows)) if use_low_precision_combine else rows

    outputs = []
    for source, ids in enumerate(topk_ids):
        goes = token_destinations(params, ep_size, ids, active_ranks)
        row_of_token = goes.cumsum(dim=0) - 1 + source * tokens_per_rank
        total = torch.zeros(len(ids), params.hidden_size, dtype=torch.float32)
        for owner in goes.any(dim=0).nonzero().flatten().tolist():
            rows = expert_outputs[owner].reshape(-1, params.hidden_size)
            tokens = goes[:, owner].nonzero().flatten()
            total[tokens] += travelled(rows[row_of_token[tokens, owner]].float())
        outputs.append(round_once(total, output_dtype or params.token_dtype))
    return outputs


def round_once(total: Tensor, dtype: torch.dtype) -> Tensor:
    """`total` (float32) to `dtype`, to nearest even; every NaN becomes the one quiet NaN without
    sign or payload.
    """
    quiet_nan = torch.full((), float("nan"), dtype=torch.float32).to(dtype)
    return torch.where(total.isnan(), quiet_nan, total.to(dtype))


def scale_by_number(expert_id: int, rows: Tensor) -> Tensor:
    """The stand-in for expert `expert_id`: rows * (expert_id + 1)."""
    return (expert_id + 1) * rows


def evaluate_experts(
    params: MoEEpCommParams,
    ep_size: int,
    rank: int,
    received: ReceivedRows,
    *,
    expert: Expert = scale_by_number,
    empty_rows: float = float("nan"),
) -> Tensor:
    """A stand-in for the consumer between dispatch and combine: [ep_size * tokens_per_rank,
    hidden_size], token dtype.

    In every row with a token the experts of `rank` are applied as `expert(expert_id, rows)` in
    float32, weighted, added in slot order in float32, and rounded once. Rows without a token get
    `empty_rows`: NaN by default, so that whoever reads one is found out. The first hidden_size
    values of a received row are the token; narrower rows are repeated.
    """
    repeats = -(-params.hidden_size // received.hidden_states.shape[1])
    tokens = received.hidden_states.float().repeat(1, repeats)[:, : params.hidden_size]
    own_experts = (expert_owners(params.num_experts, ep_size) == rank).nonzero().flatten().tolist()
    total = torch.zeros_like(tokens)
    for slot in range(params.top_k):
        ids = received.topk_ids[:, slot]
        for expert_id in sorted(set(ids.tolist())):
            if expert_id in own_experts:
                rows = (ids == expert_id).nonzero().flatten()
                value = expert(expert_id, tokens[rows])
                if received.topk_weights is not None:
                    value = value * received.topk_weights[rows, slot, None]
                total[rows] += value
    position = torch.arange(received.tokens_per_rank).repeat(ep_size)
    count = received.recv_token_counts.repeat_interleave(received.tokens_per_rank)
    total[position >= count] = empty_rows
    return round_once(total, params.token_dtype)
