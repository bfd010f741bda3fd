"""How does a one-sided backend fill the contract? A workspace in shared memory, and two ops a
round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep import _native
from moe_ep._native import Geometry
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.checks import check_type
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.errors import MoEEpConfigError
from moe_ep.one_sided import received
from moe_ep.one_sided.config import OneSidedConfig
from moe_ep.one_sided.ops import OneSidedOps
from moe_ep.params import MoEEpCommParams
from moe_ep.streams import on_stream_of, refuse_foreign_capture
from moe_ep.tensors import dense_rows, fill_with_sums


class OneSidedExchange:
    """The rounds of one communication: what its hooks call, with all that stays the same.

    Methods that have the name of a hook of MoEEpCommunication are that hook.
    """

    def __init__(
        self,
        ops: OneSidedOps,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        config: OneSidedConfig,
        layout: Geometry,
        workspace: Tensor,
    ) -> None:
        """workspace: of `layout`, initialised."""
        self.ops = ops
        self.layout = layout
        self.geometry: list[int] = layout.fields()
        self.workspace = workspace
        self._bootstrap = bootstrap
        self._device = bootstrap.torch_device
        self._ep_rank = bootstrap.rank
        self._params = params
        self._timeout_sec = config.timeout_sec
        self._enable_pdl = config.enable_pdl is not False
        self._low_precision = config.use_low_precision_combine
        self._rank_mask_enabled = config.enable_rank_mask
        self._rank_mask_words = _native.rank_mask_words(bootstrap.world_size)

    def check_call(self, call: str, active_rank_mask: Tensor | None) -> None:
        """Check what the host can see of a call besides its other arguments, before anything else.

        call: dispatch or combine, for messages.
        """
        self._check_rank_mask(active_rank_mask)
        refuse_foreign_capture(call, self._bootstrap)

    def dispatch(
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
        payloads = [dense_rows(hidden_states)]
        if hidden_states_scale is not None:
            payloads.append(dense_rows(hidden_states_scale))
        stats, mask = eplb_local_stats, active_rank_mask
        with on_stream_of(self._bootstrap):
            got = received.run_dispatch(
                self.ops,
                self.workspace,
                self.layout,
                self.geometry,
                self._ep_rank,
                topk_ids.contiguous(),
                None if topk_weights is None else topk_weights.contiguous(),
                payloads,
                eplb_local_stats=None if stats is None else stats.contiguous(),
                active_rank_mask=None if mask is None else mask.contiguous(),
                invalid_expert_id=self._params.invalid_expert_id,
                tokens_per_rank=tokens_per_rank,
                timeout_sec=self._timeout_sec,
                enable_pdl=self._enable_pdl,
            )
        return MoEEpDispatchResult(
            hidden_states=got.payloads[0],
            topk_ids=got.topk_ids,
            topk_weights=got.topk_weights,
            tokens_per_rank=tokens_per_rank,
            hidden_states_scale=got.payloads[1] if len(payloads) > 1 else None,
            eplb_gathered_stats=got.eplb_gathered_stats,
            recv_token_counts=got.recv_token_counts,
        )

    def combine(
        self,
        expert_output: Tensor,
        *,
        num_tokens: int,
        tokens_per_rank: int,
        output: Tensor | None,
        active_rank_mask: Tensor | None,
    ) -> Tensor:
        with on_stream_of(self._bootstrap):
            rows = dense_rows(expert_output)
            mask = None if active_rank_mask is None else active_rank_mask.contiguous()
            where = (self.workspace, rows, mask, self.geometry, self._ep_rank)
            if output is not None:

                def combine_into(sums: Tensor) -> None:
                    how = (self._timeout_sec, sums, self._enable_pdl, self._low_precision)
                    self.ops.combine_out(*where, tokens_per_rank, *how)

                fill_with_sums(output, combine_into)
                return output
            what = (num_tokens, tokens_per_rank, rows.shape[1], rows.dtype)
            how = (self._timeout_sec, self._enable_pdl, self._low_precision)
            combined: Tensor = self.ops.combine(*where, *what, *how)
            return combined

    def check(self) -> None:
        with on_stream_of(self._bootstrap):
            self.ops.check(self.workspace, self.geometry, self._ep_rank)

    def combine_input_buffer(self, tokens_per_rank: int) -> Tensor | None:
        """tokens_per_rank: of the open round."""
        if self._low_precision:
            return None  # rows are quantised on their way into the workspace
        return received.combine_input_buffer(
            self.workspace,
            self.layout,
            self._ep_rank,
            tokens_per_rank,
            self._params.hidden_size,
            self._params.token_dtype,
        )

    def let_go(self) -> None:
        """Hold the workspace no longer, for destroy. No other call but `check_call` may follow."""
        # The memory goes with the last object of the workspace, which waits for own rounds only:
        # peers keep their mappings of it until they destroy.
        del self.workspace

    def _check_rank_mask(self, mask: Tensor | None) -> None:
        """Check what the host can see of a mask; the op checks its bits."""
        if mask is None:
            return
        check_type("active_rank_mask", mask, Tensor)
        if not self._rank_mask_enabled:
            raise MoEEpConfigError(
                "active_rank_mask needs a communication created with enable_rank_mask=True."
            )
        if mask.dtype != torch.uint64:
            raise TypeError(f"active_rank_mask must be torch.uint64, got {mask.dtype}.")
        if tuple(mask.shape) != (self._rank_mask_words,):
            raise MoEEpConfigError(
                f"active_rank_mask must have shape [{self._rank_mask_words}] for "
                f"{self._bootstrap.world_size} ranks, got {list(mask.shape)}."
            )
        if mask.device.type != "cpu" and mask.device != self._device:
            places = "cpu" if self._device.type == "cpu" else f"cpu or {self._device}"
            raise MoEEpConfigError(f"active_rank_mask must be on {places}, got {mask.device}.")
