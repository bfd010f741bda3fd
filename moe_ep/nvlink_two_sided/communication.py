"""How does nvlink_two_sided fill the contract? FIFOs in shared memory, and received rows in
ordinary tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep._native import FifoGeometry
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.nvlink_two_sided.config import NVLinkTwoSidedConfig
from moe_ep.nvlink_two_sided.workspace import geometry_of, join_workspace
from moe_ep.params import MoEEpCommParams
from moe_ep.registry import register_communication
from moe_ep.shared_memory import SharedMemoryAlltoAll
from moe_ep.streams import refuse_foreign_capture
from moe_ep.tensors import dense_rows, fill_with_sums
from moe_ep.workspaces import Workspace


@register_communication("nvlink_two_sided", preference=3)
class NVLinkTwoSidedAlltoAll(SharedMemoryAlltoAll):
    """The two-sided backend: sender and receiver meet in a FIFO of fixed depth for each pair.

    On CUDA: on torch's current stream or the bootstrap's, two kernels in dispatch and one in
    combine; a round can be captured in a CUDA graph. On the CPU: processes of one host over
    anonymous shared memory, and a call runs on the thread that makes it. A rank's
    `workspace_bytes` depend on the number of ranks and the device alone, not on
    `max_tokens_per_rank` or `hidden_size`: rows only pass through, and what dispatch returns are
    ordinary tensors of the round, which stay valid as long as they are kept. It takes no
    `active_rank_mask`: a round needs all ranks.

    Objects of the same group, sizes or `arena`, device and stream share one workspace and take
    turns, as those of CakeAlltoAll do.
    """

    config_type = NVLinkTwoSidedConfig
    _layout: FifoGeometry
    _min_capability = (8, 0)  # the first with reductions over a warp

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        config: NVLinkTwoSidedConfig | None = None,
    ) -> None:
        """Allocate and share the FIFOs. Collective; a failure on one rank raises on all, with every
        reason. Ranks that share a GPU and have more of it together than there is get a
        RuntimeWarning."""
        config = NVLinkTwoSidedConfig() if config is None else config
        super().__init__(bootstrap, params, config)
        self._max_sm_count = config.max_sm_count or 0
        # Of the open round: a CUDA graph that Inductor makes may leave no tensor behind.
        self._send_tokens: Tensor | None = None

    @staticmethod
    def _layout_of(
        params: MoEEpCommParams,
        ep_size: int,
        config: NVLinkTwoSidedConfig,
        device: torch.device,
        *,
        spans_gpus: bool = True,
    ) -> FifoGeometry:
        return geometry_of(params, ep_size, device, spans_gpus=spans_gpus)

    def _join(self, bootstrap: BootstrapConfig, config: NVLinkTwoSidedConfig) -> Workspace:
        return join_workspace(bootstrap, self._comm, config, self._layout)

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
        refuse_foreign_capture("dispatch", self._bootstrap)
        with self._on_stream():
            fields = [
                dense_rows(tensor)
                for tensor in (hidden_states, hidden_states_scale, topk_weights)
                if tensor is not None
            ]
            row_bytes = [field.shape[1] * field.element_size() for field in fields]
            ids, send_tokens, _, recv_counts = torch.ops.moe_ep.two_sided_prepare(
                self._workspace,
                topk_ids.contiguous(),
                self._geometry,
                self.ep_rank,
                self.params.invalid_expert_id,
                tokens_per_rank,
                [*row_bytes, topk_ids.shape[1] * torch.int32.itemsize],
                topk_weights is not None,
                self._timeout_sec,
            )
            fields.append(ids)
            rows = self.ep_size * tokens_per_rank
            received = [field.new_empty((rows, field.shape[1])) for field in fields]
            torch.ops.moe_ep.two_sided_alltoallv(
                self._workspace,
                fields,
                send_tokens,
                self._geometry,
                self.ep_rank,
                self._timeout_sec,
                received,
                recv_counts,
                self._max_sm_count,
            )
            received_ids = received[-1]
            torch.ops.moe_ep.sanitize_expert_ids(
                received_ids.view(self.ep_size, tokens_per_rank, self.params.top_k),
                recv_counts,
                self.params.invalid_expert_id,
            )
        self._send_tokens = send_tokens
        return MoEEpDispatchResult(
            hidden_states=received[0],
            topk_ids=received_ids,
            topk_weights=None if topk_weights is None else received[-2],
            tokens_per_rank=tokens_per_rank,
            hidden_states_scale=None if hidden_states_scale is None else received[1],
            eplb_gathered_stats=None,
            recv_token_counts=recv_counts,
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
        refuse_foreign_capture("combine", self._bootstrap)
        with self._on_stream():
            rows = dense_rows(expert_output)
            where = (self._workspace, rows, self._send_tokens, self._geometry, self.ep_rank)
            if output is None:
                combined: Tensor = torch.ops.moe_ep.two_sided_combine(
                    *where, num_tokens, self._timeout_sec, self._max_sm_count
                )
                self._send_tokens = None
                return combined

            def combine_into(sums: Tensor) -> None:
                torch.ops.moe_ep.two_sided_combine_out(
                    *where, self._timeout_sec, sums, self._max_sm_count
                )

            fill_with_sums(output, combine_into)
            self._send_tokens = None
            return output

    def _abandon(self) -> bool:
        if self.device.type != "cpu":
            return False  # kernels wait there
        self._send_tokens = None
        where = (self._workspace, self._geometry, self.ep_rank)
        torch.ops.moe_ep.two_sided_abandon(*where, self._timeout_sec)
        return True

    def _check(self) -> None:
        with self._on_stream():
            torch.ops.moe_ep.two_sided_check(self._workspace, self._geometry, self.ep_rank)

    def _destroy(self) -> None:
        self._send_tokens = None
        super()._destroy()
