"""What do the two-sided ops do on a bare workspace? For callers that bring their own memory and
their own state machine.

The order of calls, on every rank: `initialize`, a barrier of the caller's, then rounds of
`prepare`, `alltoallv` and `combine`, at last `forget`. The ranks may be processes over shared
memory, or on the CPU threads of one process over a plain tensor (ops release the GIL).

A workspace is a torch.uint8 tensor [ep_size, >= workspace_size_per_rank(geometry)] whose row r is
the memory of rank r, each row starting on a 64-byte boundary. Its size follows from the FIFOs
alone: for each pair of ranks `num_channels` FIFOs of `num_slots` slots (a power of two) of
`slot_bytes` bytes, however many tokens there are and however wide their rows. Every function checks
what it can before it writes anything.

On the CPU `num_channels` is 1. On CUDA `slot_bytes` is a multiple of 16, all other tensors are on
the workspace's device, and calls run on torch's current stream and wait for nothing, except where
they say so. Whether the calls of a round follow each other, with the sizes and the routing of its
`prepare`, is up to the caller there; what the device records is raised by a later call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import moe_ep.ops  # noqa: F401  (loads the ops)
from moe_ep._native import FifoGeometry
from moe_ep.limits import DEFAULT_TIMEOUT_SEC

__all__ = [
    "FifoGeometry",
    "Routing",
    "alltoallv",
    "check",
    "combine",
    "forget",
    "initialize",
    "prepare",
    "workspace_size_per_rank",
]


class Routing(NamedTuple):
    """What `prepare` found out about a round. To be handed on as it is.

    topk_ids: [n, top_k] int32: the ids as receivers must see them, `invalid_expert_id` in every
        slot that names no expert.
    send_tokens: [n * min(ep_size, top_k)] int32: the tokens for rank 0 in ascending order, then
        those for rank 1, ...; -1 behind them.
    send_counts: [ep_size] int32: rows for each rank.
    recv_counts: [ep_size] int32: rows from each rank.
    """

    topk_ids: Tensor
    send_tokens: Tensor
    send_counts: Tensor
    recv_counts: Tensor


def workspace_size_per_rank(geometry: FifoGeometry) -> int:
    """Return the bytes of one rank's row of the workspace."""
    return geometry.segment_bytes


def initialize(workspace: Tensor, geometry: FifoGeometry, ep_rank: int) -> None:
    """Prepare this rank's own row: epoch 0, all FIFOs empty. A barrier must follow before the first
    `prepare`. On CUDA it waits for the stream."""
    torch.ops.moe_ep.two_sided_initialize(workspace, geometry.fields(), ep_rank)


def forget(workspace: Tensor, geometry: FifoGeometry, ep_rank: int) -> None:
    """Let go of what the process keeps about an initialised workspace outside of it; on the CPU,
    nothing. Waits for this rank's own rounds. To be called before the workspace is freed."""
    torch.ops.moe_ep.two_sided_forget(workspace, geometry.fields(), ep_rank)


def prepare(
    workspace: Tensor,
    geometry: FifoGeometry,
    ep_rank: int,
    topk_ids: Tensor,
    row_bytes: Sequence[int],
    *,
    has_weights: bool = False,
    tokens_per_rank: int | None = None,
    invalid_expert_id: int = -1,
    timeout_sec: int = DEFAULT_TIMEOUT_SEC,
) -> Routing:
    """Find out where each token goes, and tell the other ranks how many rows they will get.
    Collective.

    topk_ids: [n, top_k] int32 or int64, contiguous.
    row_bytes: bytes of a row of each field that `alltoallv` will move, 1 to MAX_PAYLOADS of them;
        equal on all ranks.
    has_weights: whether weights are among the fields; equal on all ranks, and named where it is
        not.
    tokens_per_rank: the largest n over the ranks, equal on all; None:
        `geometry.max_tokens_per_rank`.

    Raises MoEEpDisagreementError on all ranks where they disagree, with the round closed (on CUDA
    `recv_counts` are 0 then, `combine` gives NaN, and it or `check` raises); MoEEpConfigError and
    MoEEpStateError before anything is sent; MoEEpTimeoutError.
    """
    tpr = geometry.max_tokens_per_rank if tokens_per_rank is None else tokens_per_rank
    return Routing(
        *torch.ops.moe_ep.two_sided_prepare(
            workspace,
            topk_ids,
            geometry.fields(),
            ep_rank,
            invalid_expert_id,
            tpr,
            list(row_bytes),
            has_weights,
            timeout_sec,
        )
    )


def alltoallv(
    workspace: Tensor,
    geometry: FifoGeometry,
    ep_rank: int,
    rows: Sequence[Tensor],
    routing: Routing,
    received: Sequence[Tensor],
    *,
    timeout_sec: int = DEFAULT_TIMEOUT_SEC,
    max_sm_count: int | None = None,
) -> None:
    """Send every token's rows once to each rank that owns one of its experts. Once after each
    `prepare`. Collective.

    rows: a tensor [n, columns] for each field, of any dtype, its rows dense and of the bytes that
        `prepare` was told.
    received: a contiguous tensor [ep_size * tokens_per_rank, columns] for each field; the rows from
        rank s fill its block s from the start, in token order, the others stay as they are.
    max_sm_count: on CUDA, the most streaming multiprocessors to use at a time; None: no limit.

    On CUDA, where a peer does not answer in time, `routing.recv_counts` become 0.
    Raises MoEEpConfigError and MoEEpStateError before anything is sent; MoEEpTimeoutError.
    """
    torch.ops.moe_ep.two_sided_alltoallv(
        workspace,
        list(rows),
        routing.send_tokens,
        geometry.fields(),
        ep_rank,
        timeout_sec,
        list(received),
        routing.recv_counts,
        max_sm_count or 0,
    )


def combine(
    workspace: Tensor,
    geometry: FifoGeometry,
    ep_rank: int,
    expert_output: Tensor,
    routing: Routing,
    *,
    output: Tensor | None = None,
    timeout_sec: int = DEFAULT_TIMEOUT_SEC,
    max_sm_count: int | None = None,
) -> Tensor:
    """Send the experts' rows back, and sum those of each token in float32, in ascending order of
    the owner. Collective.

    expert_output: [ep_size * tokens_per_rank, hidden_size] float32, float16 or bfloat16, rows
        dense; row i belongs to received row i.
    output: [n, hidden_size] of the same dtype, contiguous; None: a new tensor. It may overlap
        expert_output.
    max_sm_count: as of `alltoallv`.

    Returns the sums [n, hidden_size], rounded once to the dtype of expert_output.
    Raises MoEEpDisagreementError on all ranks where widths or dtypes differ, with the round closed;
    MoEEpInputError after the exchange for ids of no expert; MoEEpTimeoutError.
    """
    where = (workspace, expert_output, routing.send_tokens, geometry.fields(), ep_rank)
    sms = max_sm_count or 0
    if output is not None:
        torch.ops.moe_ep.two_sided_combine_out(*where, timeout_sec, output, sms)
        return output
    num_tokens = routing.topk_ids.shape[0]
    sums: Tensor = torch.ops.moe_ep.two_sided_combine(*where, num_tokens, timeout_sec, sms)
    return sums


def check(workspace: Tensor, geometry: FifoGeometry, ep_rank: int) -> None:
    """Raise what this rank's round recorded: MoEEpTimeoutError, or MoEEpInputError for the round in
    flight; on CUDA also MoEEpDisagreementError, after waiting for this rank's own rounds."""
    torch.ops.moe_ep.two_sided_check(workspace, geometry.fields(), ep_rank)
