"""How does torch_dist fill the contract? Plainly: pack, all-to-all, unpack, add."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep.bootstrap import BootstrapConfig
from moe_ep.checks import check_type
from moe_ep.communication import MoEEpCommunication
from moe_ep.cuda_support import reason_of_absence
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.errors import MoEEpAbandonedError, MoEEpInputError
from moe_ep.params import MoEEpCommParams
from moe_ep.registry import register_communication
from moe_ep.torch_dist.captured import CapturedRounds, OpenCapturedRound
from moe_ep.torch_dist.config import TorchDistConfig
from moe_ep.torch_dist.header import (
    RoundHeader,
    pack_headers,
    require_agreement,
    unpack_headers,
)
from moe_ep.torch_dist.partials import exchange_partials
from moe_ep.torch_dist.records import pack, unpack_into
from moe_ep.torch_dist.routing import Routing, owner_of_each_expert, route
from moe_ep.torch_dist.sums import sum_by_token
from moe_ep.torch_dist.transport import NUM_TAGS, Transport


@dataclass(frozen=True)
class _OpenRound:
    """What combine needs of the dispatch before it."""

    routing: Routing
    recv_counts: list[int]


# Below every other backend for "auto": it runs anywhere and is the slowest.
@register_communication("torch_dist", preference=-1)
class TorchDistAlltoAll(MoEEpCommunication):
    """The reference backend, over the bootstrap's torch.distributed group.

    CPU tensors travel over Gloo, CUDA tensors over NCCL. The host takes part in every eager call
    and waits for the exchange. A round over NCCL can be captured in a CUDA graph after an eager one
    of the same sizes. There it moves `tokens_per_rank` rows to each rank, needed or not, waits
    without an end for a peer that does not come, and leaves it to `check` to raise what is wrong
    with ids. All received tensors are fresh. Nothing is held between rounds. After a
    MoEEpTimeoutError the process group is as broken as the object: re-create both.
    """

    config_type = TorchDistConfig
    supports_cuda_graph = True

    @classmethod
    def unsupported_reason(cls, device: torch.device | None = None) -> str | None:
        """Return why there is no `device` on this machine, None if there is. No collective."""
        return reason_of_absence(cls.backend_name, device)

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        config: TorchDistConfig | None = None,
    ) -> None:
        """Agree over the group. Collective."""
        config = TorchDistConfig() if config is None else config
        check_type("config", config, TorchDistConfig)
        super().__init__(
            bootstrap, params, config, eplb_stats_num_experts=config.eplb_stats_num_experts
        )
        # Several objects may share a group: the first rank draws the object's tags for all.
        tag = NUM_TAGS * self._comm.allgather(1 + secrets.randbelow(2**28))[0]
        self._transport = Transport(
            bootstrap.group() if self.ep_size > 1 else None,
            self.ep_rank,
            self.ep_size,
            tag,
            config.timeout_sec,
        )
        self._owners = owner_of_each_expert(params.num_experts, self.ep_size, self.device)
        self._epoch = 0
        self._open_round: _OpenRound | OpenCapturedRound | None = None
        self._captured = CapturedRounds(
            self._transport, self._owners, self.ep_size, params.invalid_expert_id
        )
        self._input_error: str | None = None

    def _dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None,
        *,
        hidden_states_scale: Tensor | None,
        tokens_per_rank: int,
        eplb_local_stats: Tensor | None,
        active_rank_mask: Tensor | None,
    ) -> MoEEpDispatchResult:
        with self._on_stream():
            is_captured = self._is_captured()
            if not is_captured:
                self._epoch += 1
                self._transport.start_call(self._epoch)
            header = self._header(
                hidden_states, hidden_states_scale, topk_weights, tokens_per_rank, eplb_local_stats
            )
            if is_captured:
                given = (hidden_states, hidden_states_scale, topk_ids, topk_weights)
                result, self._open_round = self._captured.dispatch(header, given, eplb_local_stats)
                return result
            routing = route(
                topk_ids, self._owners, self.ep_size, self.params.invalid_expert_id, self.ep_rank
            )
            columns = [hidden_states, hidden_states_scale, routing.ids, topk_weights]
            recv_counts, stats = self._agree_on_round(header, routing, eplb_local_stats)
            records = self._transport.exchange_rows(
                "dispatch",
                pack([column for column in columns if column is not None], routing.tokens),
                routing.send_counts,
                recv_counts,
            )
            received = [
                self._empty_blocks(hidden_states, tokens_per_rank),
                self._empty_blocks(hidden_states_scale, tokens_per_rank),
                self._empty_blocks(routing.ids, tokens_per_rank, self.params.invalid_expert_id),
                self._empty_blocks(topk_weights, tokens_per_rank),
            ]
            unpack_into([block for block in received if block is not None], records, recv_counts)
            self._open_round = _OpenRound(routing, recv_counts)
            self._input_error = routing.input_error
            rows, scales, ids, weights = (
                None if block is None else block.flatten(0, 1) for block in received
            )
            assert rows is not None
            assert ids is not None
            return MoEEpDispatchResult(
                hidden_states=rows,
                topk_ids=ids,
                topk_weights=weights,
                tokens_per_rank=tokens_per_rank,
                hidden_states_scale=scales,
                eplb_gathered_stats=None if eplb_local_stats is None else stats.to(self.device),
                recv_token_counts=torch.tensor(recv_counts, dtype=torch.int32, device=self.device),
            )

    def _combine(
        self,
        expert_output: Tensor,
        *,
        num_tokens: int,
        tokens_per_rank: int,
        output: Tensor | None,
        active_rank_mask: Tensor | None,
    ) -> Tensor:
        dispatched, self._open_round = self._open_round, None
        assert dispatched is not None
        if isinstance(dispatched, OpenCapturedRound):
            with self._on_stream():
                return self._captured.combine(expert_output, dispatched, output)
        with self._on_stream():
            self._transport.start_call(self._epoch)
            partials = exchange_partials(
                self._transport,
                expert_output.view(self.ep_size, tokens_per_rank, expert_output.shape[1]),
                dispatched.recv_counts,
                dispatched.routing.send_counts,
            )
            combined = sum_by_token(partials, dispatched.routing, num_tokens)
            if output is not None:
                combined = output.copy_(combined)
        self._raise_input_error()
        return combined

    def _abandon(self) -> bool:
        dispatched, self._open_round = self._open_round, None
        if not isinstance(dispatched, _OpenRound):
            return False  # in a captured graph
        with self._on_stream(), contextlib.suppress(MoEEpAbandonedError):
            self._transport.start_call(self._epoch)
            counts, width = dispatched.recv_counts, self.params.hidden_size
            nothing = torch.zeros((), dtype=self.params.token_dtype, device=self.device)
            rows = nothing.expand(self.ep_size, max(counts), width)
            exchange_partials(
                self._transport, rows, counts, dispatched.routing.send_counts, abandons=True
            )
        return True

    def _check(self) -> None:
        self._raise_input_error()
        if not self._is_captured():
            wrong = self._captured.take_wrong_ids()
            if wrong is not None:
                raise MoEEpInputError(wrong.message(self.params.num_experts, self.ep_rank))

    def _destroy(self) -> None:
        self._transport.close()

    def _raise_input_error(self) -> None:
        message, self._input_error = self._input_error, None
        if message is not None:
            raise MoEEpInputError(message)

    def _header(
        self,
        rows: Tensor,
        scales: Tensor | None,
        weights: Tensor | None,
        tokens_per_rank: int,
        eplb_local_stats: Tensor | None,
    ) -> RoundHeader:
        """Return this rank's view of a round, of the epoch that was last begun."""
        return RoundHeader(
            epoch=self._epoch,
            num_tokens=rows.shape[0],
            tokens_per_rank=tokens_per_rank,
            row_bytes=rows.shape[1] * rows.element_size(),
            scale_bytes=0 if scales is None else scales.shape[1] * scales.element_size(),
            has_weights=int(weights is not None),
            has_stats=int(eplb_local_stats is not None),
        )

    def _agree_on_round(
        self, header: RoundHeader, routing: Routing, eplb_local_stats: Tensor | None
    ) -> tuple[list[int], Tensor]:
        """Return the number of rows from each rank, and every rank's statistics. Collective."""
        no_stats = torch.zeros(self._eplb_stats_num_experts, dtype=torch.int32, device="cpu")
        stats = no_stats if eplb_local_stats is None else eplb_local_stats.cpu()
        words = pack_headers(header, routing.send_counts, stats)
        recv_counts, headers, all_stats = unpack_headers(
            self._transport.exchange_headers(words, self.device)
        )
        require_agreement(headers)
        self._captured.note_agreement(header)
        return recv_counts, all_stats

    def _empty_blocks(
        self, column: Tensor | None, tokens_per_rank: int, fill: int | None = None
    ) -> Tensor | None:
        """Return [ep_size, tokens_per_rank, *] to receive such rows, `fill` in every element."""
        if column is None:
            return None
        shape = (self.ep_size, tokens_per_rank, column.shape[1])
        return column.new_empty(shape) if fill is None else column.new_full(shape, fill)

    def _is_captured(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
