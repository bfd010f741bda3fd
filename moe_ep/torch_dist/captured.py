"""Rounds in CUDA graphs: the same collectives on every rank, of sizes that the host knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep.dispatch_result import MoEEpDispatchResult, rows_with_token
from moe_ep.errors import MoEEpStateError
from moe_ep.torch_dist.fixed_size import (
    Places,
    pack_blocks,
    sum_by_places,
    unpack_blocks,
)
from moe_ep.torch_dist.header import RoundHeader
from moe_ep.torch_dist.records import as_bytes
from moe_ep.torch_dist.routing import WrongIds, WrongIdsOnDevice, destinations
from moe_ep.torch_dist.sums import rounded
from moe_ep.torch_dist.transport import Transport


@dataclass(frozen=True)
class OpenCapturedRound:
    """What combine needs of the dispatch before it."""

    places: Places
    tokens_per_rank: int


class CapturedRounds:
    """Dispatch and combine without the host, for one communication.

    What the ranks cannot find out while a graph runs, they have found out before: it may only hold
    rounds of sizes that all ranks had agreed on in an eager one.
    """

    def __init__(
        self, transport: Transport, owners: Tensor, ep_size: int, invalid_expert_id: int
    ) -> None:
        """owners: as `owner_of_each_expert` returns them, on the communication's device."""
        self._transport = transport
        self._owners = owners
        self._ep_size = ep_size
        self._invalid_expert_id = invalid_expert_id
        self._wrong_ids = WrongIdsOnDevice(owners.device)
        self._agreed: set[tuple[int, ...]] = set()

    def note_agreement(self, header: RoundHeader) -> None:
        """Allow rounds of these sizes: all ranks have just had an eager one."""
        self._agreed.add(header.what_must_agree())

    def take_wrong_ids(self) -> WrongIds | None:
        """Return what was wrong in rounds since the last call. Waits for the device."""
        return self._wrong_ids.take()

    def dispatch(
        self,
        header: RoundHeader,
        columns: Sequence[Tensor | None],
        eplb_local_stats: Tensor | None,
    ) -> tuple[MoEEpDispatchResult, OpenCapturedRound]:
        """Return the result and what combine needs. Collective, only issued.

        columns: value rows, scale rows or None, ids, weights or None. Raises MoEEpStateError unless
        there was an eager round of these sizes.
        """
        if header.what_must_agree() not in self._agreed:
            raise MoEEpStateError(
                "this round cannot be captured yet: torch_dist needs an eager round of the same "
                "sizes first (the same runtime_max_tokens_per_rank, row bytes, and tensors given), "
                "in which the ranks find out whether they agree. Play one before the capture."
            )
        rows, scales, topk_ids, weights = columns
        assert topk_ids is not None
        found = destinations(topk_ids, self._owners, self._ep_size, self._invalid_expert_id)
        self._wrong_ids.add(topk_ids, found.is_wrong)
        places = Places.of(found.goes)
        given = [one for one in (rows, scales, found.ids, weights) if one is not None]
        tokens_per_rank = header.tokens_per_rank
        blocks = self._transport.exchange_blocks(pack_blocks(given, places, tokens_per_rank))
        counts, received = unpack_blocks(blocks, given, tokens_per_rank)
        flat = iter([one.flatten(0, 1) for one in received])
        got_rows, got_scales, got_ids, got_weights = (
            None if one is None else next(flat) for one in (rows, scales, found.ids, weights)
        )
        assert got_rows is not None
        assert got_ids is not None
        is_empty = ~rows_with_token(counts, tokens_per_rank).view(-1, 1)
        stats = None
        if eplb_local_stats is not None:
            to_each = as_bytes(eplb_local_stats.expand(self._ep_size, -1))
            stats = self._transport.exchange_blocks(to_each).view(torch.int32)
        result = MoEEpDispatchResult(
            hidden_states=got_rows,
            topk_ids=got_ids.masked_fill(is_empty, self._invalid_expert_id),
            topk_weights=got_weights,
            tokens_per_rank=tokens_per_rank,
            hidden_states_scale=got_scales,
            eplb_gathered_stats=stats,
            recv_token_counts=counts.int(),
        )
        return result, OpenCapturedRound(places, tokens_per_rank)

    def combine(
        self, expert_output: Tensor, dispatched: OpenCapturedRound, output: Tensor | None
    ) -> Tensor:
        """Return [n, hidden_size]: `output` if it is given. Collective, only issued."""
        sent = as_bytes(expert_output).view(self._ep_size, -1)
        partials = self._transport.exchange_blocks(sent).view(expert_output.dtype)
        shape = (self._ep_size, dispatched.tokens_per_rank, expert_output.shape[1])
        combined = rounded(sum_by_places(partials.view(shape), dispatched.places), partials.dtype)
        return combined if output is None else output.copy_(combined)
