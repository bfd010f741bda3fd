"""How does nvlink_two_sided fill the contract? FIFOs in shared memory, and received rows in
ordinary tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep import _native
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.checks import check_type
from moe_ep.communication import MoEEpCommunication
from moe_ep.config import CommunicationConfig
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.nvlink_two_sided.config import NVLinkTwoSidedConfig
from moe_ep.nvlink_two_sided.places import geometry_of, join_workspace
from moe_ep.params import MoEEpCommParams
from moe_ep.registry import register_communication
from moe_ep.sharing import memory_kind
from moe_ep.tensors import dense_rows, fill_with_sums


@register_communication("nvlink_two_sided", preference=3)
class NVLinkTwoSidedAlltoAll(MoEEpCommunication):
    """The two-sided backend: sender and receiver meet in a FIFO of fixed depth for each pair.

    Processes of one host over anonymous shared memory; this build runs it on the CPU. A rank's
    `workspace_bytes` depend on the number of ranks alone, not on `max_tokens_per_rank` or
    `hidden_size`: rows only pass through, and what dispatch returns are ordinary tensors of the
    round, which stay valid as long as they are kept. A call runs on the thread that makes it. It
    takes no `active_rank_mask`: a round needs all ranks.
    """

    config_type = NVLinkTwoSidedConfig
    supports_torch_compile = True
    _has_graph_ops = True
    one_host_only = True

    @classmethod
    def unsupported_reason(cls, device: torch.device | None = None) -> str | None:
        """Return why it cannot run on `device` of this machine, None if it can. No collective."""
        if device is None or device.type == "cpu":
            return None
        return f"nvlink_two_sided runs on the CPU only in this build of moe_ep, got device {device}"

    @classmethod
    def estimate_workspace_bytes(
        cls,
        params: MoEEpCommParams,
        ep_size: int,
        config: CommunicationConfig,
        *,
        device: int | str | torch.device | None = None,
    ) -> int:
        """Return the `workspace_bytes` of each rank's object before anything is allocated.

        device: as in BootstrapConfig.
        """
        check_type("config", config, NVLinkTwoSidedConfig)
        where = BootstrapConfig(1, 0, device=device).torch_device
        return _native.mapped_bytes(memory_kind(where), geometry_of(params, ep_size).segment_bytes)

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        config: NVLinkTwoSidedConfig | None = None,
    ) -> None:
        """Allocate and share the FIFOs. Collective; a failure on one rank raises on all, with every
        reason."""
        config = NVLinkTwoSidedConfig() if config is None else config
        check_type("config", config, NVLinkTwoSidedConfig)
        super().__init__(bootstrap, params, config)
        self._timeout_sec = config.timeout_sec
        layout = geometry_of(params, self.ep_size)
        self._geometry: list[int] = layout.fields()
        self._send_tokens: Tensor | None = None  # of the open round
        self._enter(join_workspace(bootstrap, self._comm, config, layout))
        self._workspace: Tensor = self._shared.tensor

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
        rows = dense_rows(expert_output)
        where = (self._workspace, rows, self._send_tokens, self._geometry, self.ep_rank)
        if output is None:
            combined: Tensor = torch.ops.moe_ep.two_sided_combine(
                *where, num_tokens, self._timeout_sec
            )
            return combined

        def combine_into(sums: Tensor) -> None:
            torch.ops.moe_ep.two_sided_combine_out(*where, self._timeout_sec, sums)

        fill_with_sums(output, combine_into)
        return output

    def _check(self) -> None:
        torch.ops.moe_ep.two_sided_check(self._workspace, self._geometry, self.ep_rank)

    def _destroy(self) -> None:
        # The memory goes with the last object of the workspace, which waits for nobody: peers keep
        # their mappings of it until they destroy.
        self._send_tokens = None
        del self._workspace
