"""How do the one-sided backends fill the contract? All alike: a workspace in shared memory, and two
ops a round.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from moe_ep import _native
from moe_ep._native import Geometry
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.checks import check_dtype, check_type
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.errors import MoEEpConfigError
from moe_ep.limits import MAX_TOP_K
from moe_ep.one_sided import received
from moe_ep.one_sided.config import OneSidedConfig
from moe_ep.one_sided.kernels import OneSidedKernels
from moe_ep.one_sided.workspace import geometry_of, join_workspace, rows_are_whole
from moe_ep.params import MoEEpCommParams
from moe_ep.shared_batch import SharedBatch
from moe_ep.shared_memory import SharedMemoryAlltoAll
from moe_ep.streams import refuse_foreign_capture
from moe_ep.tensors import dense_rows, fill_with_sums
from moe_ep.workspaces import Workspace


class OneSidedAlltoAll(SharedMemoryAlltoAll):
    """A backend derives from this class and has a config derived from OneSidedConfig. It sets what
    makes it another one than the others: `_kernels`, and the GPUs that they need.
    """

    _kernels: ClassVar[OneSidedKernels]
    _layout: Geometry
    _layout_of = staticmethod(geometry_of)

    def __init__(
        self, bootstrap: BootstrapConfig, params: MoEEpCommParams, config: OneSidedConfig
    ) -> None:
        super().__init__(
            bootstrap,
            params,
            config,
            extra_payload_bytes_per_token=config.extra_payload_bytes_per_token,
            eplb_stats_num_experts=config.eplb_stats_num_experts,
        )
        self._has_gradients &= not config.use_low_precision_combine
        self._ops = self._kernels.ops
        self._enable_pdl = config.enable_pdl is not False
        self._low_precision = config.use_low_precision_combine
        self._takes_rows_in_place = not self._low_precision or (
            self.device.type != "cpu" and rows_are_whole(params, config, self._layout)
        )
        self._most_combine_rows: Tensor | None = None
        self._rank_mask_words = _native.rank_mask_words(self.ep_size)

    def _join(self, bootstrap: BootstrapConfig, config: OneSidedConfig) -> Workspace:
        return join_workspace(self._kernels, bootstrap, self._comm, config, self._layout)

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        *,
        hidden_states_scale: Tensor | None = None,
        runtime_max_tokens_per_rank: int | None = None,
        eplb_local_stats: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
    ) -> MoEEpDispatchResult:
        """Send every token to the ranks that own its experts; see MoEEpCommunication.dispatch.
        Collective.

        active_rank_mask: [ceil(ep_size / 64)] uint64, bit i set for each active rank; the same on
            all active ranks and in both calls of a round; needs `enable_rank_mask`. On the CPU, or
            on `device`: then it is read when the kernel runs, also in a captured graph. Tokens to
            other ranks are dropped, and nothing is sent to them or awaited from them. None: all
            ranks are active. Mask a rank only once it is dead or has returned from its last
            combine, on CUDA from a `check` behind it: nobody waits until it has read what it still
            needs. To have it back, call `reinitialize` on it and on the others, before its bit is
            set again.
        """
        self._check_call("dispatch", active_rank_mask)
        return self._run_dispatch(
            hidden_states,
            topk_ids,
            topk_weights,
            hidden_states_scale=hidden_states_scale,
            runtime_max_tokens_per_rank=runtime_max_tokens_per_rank,
            eplb_local_stats=eplb_local_stats,
            active_rank_mask=active_rank_mask,
        )

    def combine(
        self,
        expert_output: Tensor,
        *,
        output: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
    ) -> Tensor:
        """Bring the partial rows back and sum them; see MoEEpCommunication.combine. Collective.

        active_rank_mask: the mask that dispatch got.
        """
        self._check_call("combine", active_rank_mask)
        return self._run_combine(expert_output, output=output, active_rank_mask=active_rank_mask)

    def _check_call(self, call: str, active_rank_mask: Tensor | None) -> None:
        """Check what the host can see of a call besides its other arguments, before anything else.

        call: dispatch or combine, for messages.
        """
        self._check_rank_mask(active_rank_mask)
        refuse_foreign_capture(call, self._bootstrap)

    def _check_rank_mask(self, mask: Tensor | None) -> None:
        """Check what the host can see of a mask; the op checks its bits."""
        if mask is None:
            return
        check_type("active_rank_mask", mask, Tensor)
        if not self._rank_mask_enabled:
            raise MoEEpConfigError(
                "active_rank_mask needs a communication created with enable_rank_mask=True."
            )
        check_dtype("active_rank_mask", mask, (torch.uint64,))
        if tuple(mask.shape) != (self._rank_mask_words,):
            raise MoEEpConfigError(
                f"active_rank_mask must have shape [{self._rank_mask_words}] for {self.ep_size} "
                f"ranks, got {list(mask.shape)}."
            )
        if mask.device.type != "cpu" and mask.device != self.device:
            places = "cpu" if self.device.type == "cpu" else f"cpu or {self.device}"
            raise MoEEpConfigError(f"active_rank_mask must be on {places}, got {mask.device}.")

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
        payloads = [dense_rows(hidden_states)]
        if hidden_states_scale is not None:
            payloads.append(dense_rows(hidden_states_scale))
        stats, mask = eplb_local_stats, active_rank_mask
        with self._on_stream():
            got = received.run_dispatch(
                self._ops,
                self._workspace,
                self._layout,
                self._geometry,
                self.ep_rank,
                topk_ids.contiguous(),
                None if topk_weights is None else topk_weights.contiguous(),
                payloads,
                eplb_local_stats=None if stats is None else stats.contiguous(),
                active_rank_mask=None if mask is None else mask.contiguous(),
                invalid_expert_id=self.params.invalid_expert_id,
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

    def _combine(
        self,
        expert_output: Tensor,
        *,
        num_tokens: int,
        tokens_per_rank: int,
        output: Tensor | None,
        active_rank_mask: Tensor | None,
    ) -> Tensor:
        with self._on_stream():
            rows = dense_rows(expert_output)
            mask = None if active_rank_mask is None else active_rank_mask.contiguous()
            where = (self._workspace, rows, mask, self._geometry, self.ep_rank)
            if output is not None:

                def combine_into(sums: Tensor) -> None:
                    how = (self._timeout_sec, sums, self._enable_pdl, self._low_precision)
                    self._ops.combine_out(*where, tokens_per_rank, *how)

                fill_with_sums(output, combine_into)
                return output
            what = (num_tokens, tokens_per_rank, rows.shape[1], rows.dtype)
            how = (self._timeout_sec, self._enable_pdl, self._low_precision)
            combined: Tensor = self._ops.combine(*where, *what, *how)
            return combined

    def _check(self) -> None:
        with self._on_stream():
            self._ops.check(self._workspace, self._geometry, self.ep_rank)

    def _combine_input_buffer(self) -> Tensor | None:
        if not self._takes_rows_in_place:
            return None  # rows are quantised on their way into the workspace
        return self._combine_rows(self._tokens_per_rank)

    def _abandon(self) -> bool:
        if self.device.type != "cpu":
            return False  # kernels wait there
        self._ops.abandon(self._workspace, self._geometry, self.ep_rank, self._timeout_sec)
        return True

    def _begin_shared_batch(self, topk_ids: Tensor) -> SharedBatch | None:
        # On CUDA another rank's rows are for kernels, which order what they read.
        if self._low_precision or self.device.type != "cpu" or self.ep_size > MAX_TOP_K:
            return None
        num_tokens = topk_ids.shape[0]
        if num_tokens > self.ep_size * self.params.max_tokens_per_rank:
            return None
        where = (self._workspace, self._geometry, self.ep_rank)
        self._ops.begin_shared_batch(
            self._workspace, topk_ids, self._geometry, self.ep_rank, self._timeout_sec
        )
        what = (num_tokens, self.params.hidden_size, self.params.token_dtype)
        end = partial(self._ops.end_shared_batch, *where, *what, self._timeout_sec)
        return SharedBatch(self._all_combine_rows()[:num_tokens], end)

    def _all_combine_rows(self) -> Tensor:
        """Return the input of combine in a round of the most tokens."""
        if self._most_combine_rows is None:
            self._most_combine_rows = self._combine_rows(self.params.max_tokens_per_rank)
        return self._most_combine_rows

    def _combine_rows(self, tokens_per_rank: int) -> Tensor:
        return received.combine_input_buffer(
            self._workspace,
            self._layout,
            self.ep_rank,
            tokens_per_rank,
            self.params.hidden_size,
            self.params.token_dtype,
        )

    def _destroy(self) -> None:
        self._most_combine_rows = None
        super()._destroy()
