"""How do the backends on the one-sided transport fill the contract? All alike."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_ep import _native, cuda_support, shared_gpus
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.checks import check_type
from moe_ep.communication import MoEEpCommunication
from moe_ep.config import CommunicationConfig
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.one_sided.config import OneSidedConfig
from moe_ep.one_sided.exchange import OneSidedExchange
from moe_ep.one_sided.kernels import OneSidedKernels
from moe_ep.one_sided.workspace import geometry_of, join_workspace
from moe_ep.params import MoEEpCommParams
from moe_ep.sharing import memory_kind


class OneSidedAlltoAll(MoEEpCommunication):
    """A backend derives from this class and has a config derived from OneSidedConfig. It sets what
    makes it another one than the others: `_kernels`, and the GPUs that they need.
    """

    _kernels: ClassVar[OneSidedKernels]
    _min_capability: ClassVar[cuda_support.Capability]
    """Of CUDA devices, and of the code for them."""
    supports_cuda_graph = True
    supports_torch_compile = True
    _has_graph_ops = True
    one_host_only = True

    @classmethod
    def unsupported_reason(cls, device: torch.device | None = None) -> str | None:
        """Return why it cannot run on `device` of this machine, None if it can. No collective."""
        return cuda_support.reason_against(cls.backend_name, cls._min_capability, device)

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
        check_type("config", config, cls.config_type)
        assert isinstance(config, OneSidedConfig)  # what the line above says, for mypy
        where = BootstrapConfig(1, 0, device=device).torch_device
        geometry = geometry_of(params, ep_size, config, where)
        return _native.mapped_bytes(memory_kind(where), geometry.segment_bytes)

    def __init__(
        self, bootstrap: BootstrapConfig, params: MoEEpCommParams, config: OneSidedConfig
    ) -> None:
        check_type("config", config, self.config_type)
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
            self._enter(join_workspace(self._kernels, bootstrap, self._comm, config, layout))
        self._exchange = OneSidedExchange(
            self._kernels.ops, bootstrap, params, config, layout, self._shared.tensor
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

        active_rank_mask: [ceil(ep_size / 64)] uint64, bit i set for each active rank; the same on
            all active ranks and in both calls of a round; needs `enable_rank_mask`. On the CPU, or
            on `device`: then it is read when the kernel runs, also in a captured graph. Tokens to
            other ranks are dropped, and nothing is sent to them or awaited from them. None: all
            ranks are active. Mask a rank only once it is dead or has returned from its last
            combine: nobody waits until it has read what it still needs. To have it back, call
            `reinitialize` on it and on the others, before its bit is set again.
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
