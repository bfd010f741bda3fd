"""How does cake fill the contract? A workspace in shared memory, and two ops a round."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep import _native, shared_gpus
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.cake import received
from moe_ep.cake.config import CakeAlltoAllConfig
from moe_ep.cake.places import geometry_of, join_workspace, reason_against
from moe_ep.captures import refuse_foreign_capture
from moe_ep.checks import check_type
from moe_ep.communication import MoEEpCommunication
from moe_ep.config import CommunicationConfig
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.errors import MoEEpConfigError
from moe_ep.params import MoEEpCommParams
from moe_ep.registry import register_communication
from moe_ep.sharing import memory_kind
from moe_ep.tensors import dense_rows, fill_with_sums


@register_communication("cake", preference=10)
class CakeAlltoAll(MoEEpCommunication):
    """The fused one-sided backend: every rank writes into the others' memory and reads from it.

    On CUDA: one kernel a call, on torch's current stream or the bootstrap's; a round can be
    captured in a CUDA graph. On the CPU: processes of one host over anonymous shared memory. One
    workspace of `estimate_workspace_bytes(params, ep_size, config)` bytes per rank, allocated at
    construction, none per round.

    Objects of the same group share one workspace and take turns, a round each, if the sizes of
    their rows and rounds, `enable_rank_mask`, the device and the bootstrap's stream are the same.
    The group is that of comm_backend, else the process group (that given or the default one), else
    this process alone. What the device records about one object's round may be raised by another's
    call, and a failure that breaks one breaks all. Rounds on different streams must be ordered as
    those of one object.

    What dispatch returns are views of the workspace in eager code and copies in compiled graphs,
    where a view that outlives its round could not be told from one that does not.
    """

    config_type = CakeAlltoAllConfig
    supports_cuda_graph = True
    supports_torch_compile = True
    one_host_only = True

    @classmethod
    def unsupported_reason(cls, device: torch.device | None = None) -> str | None:
        """Return why cake cannot run on `device` of this machine, None if it can. No collective."""
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
        check_type("config", config, CakeAlltoAllConfig)
        assert isinstance(config, CakeAlltoAllConfig)  # what the line above says, for mypy
        where = BootstrapConfig(1, 0, device=device).torch_device
        geometry = geometry_of(params, ep_size, config, where)
        return _native.mapped_bytes(memory_kind(where), geometry.segment_bytes)

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        config: CakeAlltoAllConfig | None = None,
    ) -> None:
        """Allocate and share the workspace. Collective; a failure on one rank raises on all, with
        every reason. Ranks that share a GPU and have more of it together than there is get a
        RuntimeWarning."""
        config = CakeAlltoAllConfig() if config is None else config
        check_type("config", config, CakeAlltoAllConfig)
        super().__init__(
            bootstrap,
            params,
            config,
            extra_payload_bytes_per_token=config.extra_payload_bytes_per_token,
            eplb_stats_num_experts=config.eplb_stats_num_experts,
        )
        shared_gpus.warn_of_overlapping_shares(self._gpu_shares, self.ep_rank)
        self._rank_mask_enabled = config.enable_rank_mask
        self._rank_mask_words = _native.rank_mask_words(self.ep_size)
        self._timeout_sec = config.timeout_sec
        self._enable_pdl = config.enable_pdl is not False
        self._low_precision = config.use_low_precision_combine
        self._has_gradients &= not self._low_precision
        spans_gpus = shared_gpus.are_several(self._gpu_shares)
        self._layout = geometry_of(params, self.ep_size, config, self.device, spans_gpus=spans_gpus)
        self._geometry: list[int] = self._layout.fields()
        with self._on_stream():
            self._enter(join_workspace(bootstrap, self._comm, config, self._layout))
        self._workspace: Tensor = self._shared.tensor

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
            combine: nobody waits until it has read what it still needs. It cannot come back into
            this object, nor into those that share its workspace.
        """
        self._check_rank_mask(active_rank_mask)
        self._refuse_foreign_capture("dispatch")
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
        self._check_rank_mask(active_rank_mask)
        self._refuse_foreign_capture("combine")
        return self._run_combine(expert_output, output=output, active_rank_mask=active_rank_mask)

    def _refuse_foreign_capture(self, call: str) -> None:
        refuse_foreign_capture(call, self.device, self._bootstrap.stream, self._on_stream)

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
                    torch.ops.moe_ep.cake_combine_out(*where, tokens_per_rank, *how)

                fill_with_sums(output, combine_into)
                return output
            what = (num_tokens, tokens_per_rank, rows.shape[1], rows.dtype)
            how = (self._timeout_sec, self._enable_pdl, self._low_precision)
            combined: Tensor = torch.ops.moe_ep.cake_combine(*where, *what, *how)
            return combined

    def _check(self) -> None:
        with self._on_stream():
            torch.ops.moe_ep.cake_check(self._workspace, self._geometry, self.ep_rank)

    def _combine_input_buffer(self) -> Tensor | None:
        if self._low_precision:
            return None  # rows are quantised on their way into the workspace
        return received.combine_input_buffer(
            self._workspace,
            self._layout,
            self.ep_rank,
            self._tokens_per_rank,
            self.params.hidden_size,
            self.params.token_dtype,
        )

    def _destroy(self) -> None:
        # The memory goes with the last object of the workspace, which waits for own rounds only:
        # peers keep their mappings of it until they destroy.
        del self._workspace
