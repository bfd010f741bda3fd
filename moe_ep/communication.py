"""What is a communication? The contract that users call.

How a call goes, which must not differ between backends, is in `moe_ep.rounds`, with the hooks that
a backend fills in: `_dispatch`, `_combine`, and of the others those that it needs; what is not of a
round, in `moe_ep.life_cycle`.
"""

from __future__ import annotations

from typing import ClassVar, Final

import torch
from torch import Tensor

from moe_ep import abandoned_round, checks
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.config import CommunicationConfig
from moe_ep.construction import agree_on_construction
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.expert_major import ExpertMajorRows, permute_to_experts, unpermute_from_experts
from moe_ep.params import MoEEpCommParams
from moe_ep.rounds import Rounds
from moe_ep.workspaces import DISPATCHED


class MoEEpCommunication(Rounds):
    """One long-lived object per expert-parallel group: dispatch, experts, combine, dispatch, ...

    All ranks of the group construct it together and issue the same calls in the same order; one
    dispatch/combine pair is in flight. A context manager that destroys on exit. Nothing collective
    happens in a finaliser, and a process may exit without destroy. Copying and pickling raise
    TypeError.

    A backend derives from this class once:

    * class attributes `config_type`, `supports_cuda_graph`, `supports_torch_compile`,
      `one_host_only`;
    * `unsupported_reason(device)`;
    * `__init__(bootstrap, params, config)`, which calls this one and then sets up what it needs,
      collectively, over `self._comm`;
    * the hooks `_dispatch`, `_combine` (needed), `_abandon`, `_check`, `_combine_input_buffer`,
      `_begin_shared_batch`, `_destroy`.

    A backend with memory of its own has it in a `Workspace` and calls `_enter` with that one.

    Hooks get checked arguments and know nothing about the state machine. They report failures by
    raising; ops of the library raise its errors (see `moe_ep.errors`). MoEEpTimeoutError,
    MoEEpMaskDisagreementError and any exception that is not of this library break the object; after
    any other error the object goes on.
    A backend that takes more keywords (`active_rank_mask`) overrides `dispatch` and `combine` with
    the longer signature, checks the extra argument and calls `_run_dispatch` / `_run_combine`.
    """

    config_type: ClassVar[type[CommunicationConfig]]
    supports_cuda_graph: ClassVar[bool] = False
    """True: a round may be captured in a CUDA graph after one eager warm-up of the same shapes."""
    supports_torch_compile: ClassVar[bool] = True
    """True: a round traces into one graph with `torch.compile(fullgraph=True)`."""
    one_host_only: ClassVar[bool] = False
    """True: all ranks of the group must be on one host, in one network namespace."""

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        config: CommunicationConfig,
        *,
        extra_payload_bytes_per_token: int = 0,
        eplb_stats_num_experts: int = 0,
    ) -> None:
        """Check the arguments and agree on them over the group. Collective.

        extra_payload_bytes_per_token: bytes by which a torch.uint8 row may exceed the dispatch
            format's row.
        eplb_stats_num_experts: length of eplb_local_stats, 0..num_experts; 0: no statistics.

        Raises on all ranks of the group together, with every rank's reason or values: TypeError
        and MoEEpConfigError for an argument that is wrong on any of them, MoEEpConfigError where
        they disagree about params, settings, backend or library version, MoEEpPlatformError where
        the backend cannot run on some rank. Only a wrong `bootstrap` and a `config` of another type
        raise on their own rank alone: it cannot tell the others.
        """
        checks.check_group(type(self).config_type, bootstrap, config)
        comm = bootstrap.comm(config.comm_backend, timeout_sec=config.timeout_sec)
        gpu_shares = agree_on_construction(
            type(self), comm, params, config, bootstrap.torch_device, eplb_stats_num_experts
        )
        super().__init__(
            bootstrap,
            params,
            config,
            comm,
            extra_payload_bytes_per_token=extra_payload_bytes_per_token,
            eplb_stats_num_experts=eplb_stats_num_experts,
        )
        self._gpu_shares: Final = gpu_shares

    @classmethod
    def unsupported_reason(cls, device: torch.device | None = None) -> str | None:
        """Return why this backend cannot run on `device` of this machine, or None if it can.

        No collective. device: None asks whether any device of this machine would do.
        """
        return None

    @classmethod
    def is_platform_supported(cls, device: torch.device | None = None) -> bool:
        """Return whether this backend can run on `device` of this machine. No collective."""
        return cls.unsupported_reason(device) is None

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        *,
        hidden_states_scale: Tensor | None = None,
        runtime_max_tokens_per_rank: int | None = None,
        eplb_local_stats: Tensor | None = None,
    ) -> MoEEpDispatchResult:
        """Send every token once to each rank that owns at least one of its experts. Collective.

        Differentiable with respect to hidden_states, where rows are not quantised,
        and topk_weights. Backward is collective, too: grad mode, and requires_grad of each
        argument, must be the same on all ranks, also where n is 0, and all ranks run it. In grad
        mode the result is copied; call inference under torch.no_grad().

        All tensors are on `device`; non-contiguous ones are legal. n may differ on every rank and
        round, 0 included.

        hidden_states: [n, row] in the dispatch format (unquantised: [n, hidden_size] in
            `params.token_dtype`).
        topk_ids: [n, top_k] int32 or int64, global expert ids. A negative id or `invalid_expert_id`
            is padding: it sends nothing. Any other id outside `[0, num_experts)` is skipped,
            recorded and raised as MoEEpInputError by `check` between the two calls, else by
            `combine` after its exchange.
        topk_weights: [n, top_k] float32, or None (on all ranks).
        hidden_states_scale: [n, scale_row] where the dispatch format has scales.
        runtime_max_tokens_per_rank: the largest n over the ranks in this round, equal on all of
            them; becomes tokens_per_rank. None: `params.max_tokens_per_rank`.
        eplb_local_stats: [eplb_stats_num_experts] int32, gathered from all ranks; needs that
            setting.

        Raises TypeError (dtype), MoEEpConfigError (shape, device, size) and MoEEpStateError before
        anything is sent.
        Raises MoEEpDisagreementError on all ranks if they disagree about the round, which is then
        closed. Raises MoEEpTimeoutError if a peer does not answer in `timeout_sec`, and on the CPU
        soon after its process has ended or it has given up itself; the object is then broken. Where
        the device finds out (on CUDA, but for torch_dist), `check` raises both, else a later call:
        a time-out any, a disagreement a combine. Until then nothing counts as received, and the
        sums are NaN.
        """
        return self._run_dispatch(
            hidden_states,
            topk_ids,
            topk_weights,
            hidden_states_scale=hidden_states_scale,
            runtime_max_tokens_per_rank=runtime_max_tokens_per_rank,
            eplb_local_stats=eplb_local_stats,
        )

    def combine(self, expert_output: Tensor, *, output: Tensor | None = None) -> Tensor:
        """Bring the partial rows back to their source ranks and sum them. Collective.

        Differentiable with respect to expert_output. The output requires grad where
        an input of the dispatch did, too, so that no rank's backward leaves the round out.

        expert_output: [ep_size * tokens_per_rank, hidden_size] or [ep_size, tokens_per_rank,
            hidden_size] in `params.token_dtype` on `device`; row i belongs to received row i, rows
            without a token are never read.
        output: [n, hidden_size], same dtype and device, with memory of its own for each element;
            written and returned when given, else a new tensor is returned. None in a round with
            gradients.

        Every token's rows are added in float32 in ascending order of the owning rank and rounded
        once; a token that went nowhere is exact +0.0, a NaN is the dtype's canonical quiet NaN.

        Raises TypeError, MoEEpConfigError, MoEEpStateError before anything is sent, with the round
        still open; MoEEpInputError after the exchange if this rank dispatched an invalid id
        (`output` is written, the object is ready for the next round); MoEEpAbandonedError if a peer
        has called `abandon_round`; MoEEpTimeoutError if one does not answer in `timeout_sec`. Where
        the device finds out (on CUDA, but for torch_dist), what it has not recorded yet when
        combine is called is raised by a later combine or by `check`.
        """
        return self._run_combine(expert_output, output=output)

    def abandon_round(self) -> None:
        """End an open round without expert outputs: what to call where an exception came between
        dispatch and combine. Collective, in place of combine.

        Peers raise MoEEpAbandonedError out of their combine, at once and with the ranks that called
        this; on these it returns, when all have come. Everywhere the round is over, and the next
        dispatch is as always. Where no round of this object is open, nothing happens: it can be
        called whatever has raised. MoEEpLayer and the integrations call it by themselves, but not
        in a graph of torch.compile: there it is for whoever calls the graph, on all ranks.

        Of the shared-memory backends on CUDA, and in a round that torch_dist captures, peers cannot
        be told: the object is broken, and they time out in combine. `reinitialize` on all ranks
        mends that, where the backend has it.

        Waits for the peers' combine; raises MoEEpTimeoutError if one does not come to it in
        `timeout_sec`.
        """
        abandoned_round.abandon(self)

    def get_combine_input_buffer(self, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return library memory for the expert output; handing it to combine saves a copy.

        [ep_size * tokens_per_rank, hidden_size], or None where a backend has none or an input of
        the dispatch requires grad. Only between dispatch and combine.

        dtype: `params.token_dtype`, or None for it.
        """
        self._require(DISPATCHED, "get_combine_input_buffer")
        if dtype is not None:
            checks.check_combine_input_dtype("dtype", self.params, dtype)
        if self._traced is not None:
            return None
        if self._recorded is not None and self._recorded.link is not None:
            return None  # the experts' last step may save what it writes
        buffer = self._combine_input_buffer()
        # Detached, so that a tensor that requires grad, written into it, does not drag the whole
        # workspace into the graph.
        return buffer if buffer is None else buffer.detach()

    def permute_to_experts(
        self, result: MoEEpDispatchResult, *, alignment: int = 1, max_rows: int | None = None
    ) -> ExpertMajorRows:
        """Return the received rows grouped by local expert, for grouped matrix products.

        Not collective, and no wait for the device. Only between dispatch and combine. A row for
        each pick of a local expert; differentiable in hidden_states and topk_weights. What comes
        out is fresh memory, and outlives the round.

        alignment: groups begin at multiples of it (128 for many FP8 kernels).
        max_rows: room for so many rows, a multiple of alignment. None: for every pick that could be
            local, R * tpr * top_k of them and the padding, which is top_k times what a round of
            evenly spread picks needs. Where a pick finds no room, the received row that it is of
            comes back as NaN from `unpermute_from_experts`; see `is_incomplete`.

        Raises TypeError, MoEEpConfigError and MoEEpStateError.
        """
        self._require(DISPATCHED, "permute_to_experts")
        first, count = self.first_local_expert, self.num_local_experts
        return permute_to_experts(result, first, count, alignment=alignment, max_rows=max_rows)

    def unpermute_from_experts(
        self, rows: Tensor, permuted: ExpertMajorRows, *, apply_weights: bool = True
    ) -> Tensor:
        """Return [R * tpr, hidden_size], what combine takes: for each received row the sum over its
        local picks of weight * row.

        Not collective, and no wait for the device. Products and sums are in float32, in the order
        of the picks, and rounded once to the dtype of `rows`. Differentiable in rows and the
        weights. Received rows without a local pick are 0.

        rows: [M, hidden_size] bfloat16, float16 or float32: the experts' outputs, a row for each of
            `permute_to_experts`. Rows of zeros are not read.
        apply_weights: False: the experts have applied them, or there are none.

        Raises TypeError and MoEEpConfigError.
        """
        return unpermute_from_experts(rows, permuted, apply_weights=apply_weights)

    def check(self) -> None:
        """Wait for the device and raise what it recorded: MoEEpTimeoutError, MoEEpInputError,
        MoEEpDisagreementError (a round that is open stays so: combine ends it).

        Not collective. Raises MoEEpStateError after destroy, while the memory is released, or on a
        broken object.
        """
        self._require_alive("check")
        self._shared.require_memory("check", self._who)
        try:
            self._check()
        except Exception as exc:
            self._settle(exc, self._shared.state)

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
        return 0

    def __repr__(self) -> str:
        state = "destroyed" if self._destroyed else self._shared.state
        return (
            f"{type(self).__name__}(ep_rank={self.ep_rank}, ep_size={self.ep_size}, "
            f"device={self.device}, state={state!r}, {self.params})"
        )
