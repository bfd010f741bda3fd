"""How does nvlink_one_sided fill the contract? With rounds of the one-sided transport."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ep import _native, shared_gpus
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.checks import check_type
from moe_ep.communication import MoEEpCommunication
from moe_ep.config import CommunicationConfig
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.nvlink_one_sided.config import NVLinkOneSidedConfig
from moe_ep.nvlink_one_sided.kernels import KERNELS
from moe_ep.nvlink_one_sided.places import geometry_of, reason_against
from moe_ep.one_sided.exchange import OneSidedExchange
from moe_ep.one_sided.places import join_workspace
from moe_ep.params import MoEEpCommParams
from moe_ep.registry import register_communication
from moe_ep.sharing import memory_kind


@register_communication("nvlink_one_sided", preference=6)
class NVLinkOneSidedAlltoAll(MoEEpCommunication):
    """The portable one-sided backend: rows are put by their source and got by the combine.

    It needs no bulk-copy engine, so that it runs on every GPU from compute capability 8.0 on; on
    the CPU, processes of one host. Small steps may go over the Lamport transport, whose data are
    their own flags, see NVLinkOneSidedConfig.lamport; others over the fence transport, for every
    size. All else is as it is for CakeAlltoAll: the workspace and who shares it, graphs, streams,
    views; and so are the bits of every result.
    """

    config_type = NVLinkOneSidedConfig
    supports_cuda_graph = True
    supports_torch_compile = True
    _has_graph_ops = True
    one_host_only = True

    @classmethod
    def unsupported_reason(cls, device: torch.device | None = None) -> str | None:
        """Return why it cannot run on `device` of this machine, None if it can. No collective."""
        return reason_against(device)

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
        check_type("config", config, NVLinkOneSidedConfig)
        assert isinstance(config, NVLinkOneSidedConfig)  # what the line above says, for mypy
        where = BootstrapConfig(1, 0, device=device).torch_device
        geometry = geometry_of(params, ep_size, config, where)
        return _native.mapped_bytes(memory_kind(where), geometry.segment_bytes)

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        config: NVLinkOneSidedConfig | None = None,
    ) -> None:
        """Allocate and share the workspace. Collective; a failure on one rank raises on all, with
        every reason. Ranks that share a GPU and have more of it together than there is get a
        RuntimeWarning."""
        config = NVLinkOneSidedConfig() if config is None else config
        check_type("config", config, NVLinkOneSidedConfig)
        super().__init__(
            bootstrap,
            params,
            config,
            extra_payload_bytes_per_token=config.extra_payload_bytes_per_token,
            eplb_stats_num_experts=config.eplb_stats_num_experts,
        )
        shared_gpus.warn_of_overlapping_shares(self._gpu_shares, self.ep_rank)
        self._has_gradients &= not config.use_low_precision_combine
        spans_gpus = shared_gpus.are_several(self._gpu_shares)
        layout = geometry_of(params, self.ep_size, config, self.device, spans_gpus=spans_gpus)
        with self._on_stream():
            self._enter(
                join_workspace(
                    KERNELS,
                    bootstrap,
                    self._comm,
                    config,
                    layout,
                    enable_rank_mask=config.enable_rank_mask,
                )
            )
        self._exchange = OneSidedExchange(
            KERNELS.ops, bootstrap, params, config, layout, self._shared.tensor
        )

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

        active_rank_mask: as in CakeAlltoAll.dispatch.
        """
        self._exchange.check_call("dispatch", active_rank_mask)
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
        self._exchange.check_call("combine", active_rank_mask)
        return self._run_combine(expert_output, output=output, active_rank_mask=active_rank_mask)

    def _dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None,
        **options: Any,
    ) -> MoEEpDispatchResult:
        return self._exchange.dispatch(hidden_states, topk_ids, topk_weights, **options)

    def _combine(self, expert_output: Tensor, **options: Any) -> Tensor:
        return self._exchange.combine(expert_output, **options)

    def _check(self) -> None:
        self._exchange.check()

    def _combine_input_buffer(self) -> Tensor | None:
        return self._exchange.combine_input_buffer(self._tokens_per_rank)

    def _destroy(self) -> None:
        self._exchange.let_go()
