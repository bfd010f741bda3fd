"""What is a communication? The contract that users call, and the hooks that a backend fills in.

The base class owns everything that must not differ between backends: the argument checks, the state
machine. A backend implements `_dispatch` and `_combine`, and where it needs them `_check`,
`_combine_input_buffer`, `_destroy`. The state belongs to the workspace, which several objects may
share (`moe_ep.workspaces`). All that the compiled path touches of it is plain attributes (int,
str), so that torch.compile traces a whole round into one graph.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from moe_ep import (
    abandoned_round,
    autograd,
    backward_round,
    checks,
    compiled_round,
    graph_names,
)
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.config import CommunicationConfig
from moe_ep.construction import agree_on_construction
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.errors import (
    MoEEpAbandonedError,
    MoEEpDisagreementError,
    MoEEpError,
    MoEEpInputError,
    MoEEpMaskDisagreementError,
    MoEEpTimeoutError,
    is_of_library,
)
from moe_ep.expert_major import ExpertMajorRows, permute_to_experts, unpermute_from_experts
from moe_ep.life_cycle import LifeCycle
from moe_ep.params import MoEEpCommParams, expert_partition
from moe_ep.workspaces import BROKEN, DISPATCHED, IDLE

Result = TypeVar("Result")


class SharedBatch(NamedTuple):
    """A round of ranks that hold the same tokens.

    rows: [n, hidden_size], where this rank puts its sums for each token, zeros where it has none.
    end: ends the round, as a hook: returns what all ranks have put there, added up.
    """

    rows: Tensor
    end: Callable[[], Tensor]


class MoEEpCommunication(LifeCycle):
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
    _has_graph_ops: ClassVar[bool] = False
    """True: `_dispatch` and `_combine` can be traced; else compiled graphs have ops that call them,
    see `moe_ep.compiled_round`, which they have for gradients in any case."""
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
        super().__init__(bootstrap, config, comm)
        first, count = expert_partition(params.num_experts, self.ep_size, self.ep_rank)
        self.params: Final = params
        self.first_local_expert: Final[int] = first
        self.num_local_experts: Final[int] = count
        self._gpu_shares: Final = gpu_shares
        self._row_format: Final = params.row_format
        self._extra_payload_bytes: Final = extra_payload_bytes_per_token
        self._eplb_stats_num_experts: Final = eplb_stats_num_experts
        self._num_tokens: int = 0
        self._tokens_per_rank: int = 0
        # Of unquantised rows. A backend whose combine has no room for them clears it.
        self._has_gradients: bool = self._row_format.value_dtypes == (params.token_dtype,)
        self._recorded: backward_round.RoutedRound | None = None
        self._graph_name: Final = graph_names.name(self)
        self._traced: compiled_round.TracedRound | None = None

    # ---------------------------------------------------------------- what users call

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

        Of the shared-memory backends on CUDA peers cannot be told: the object is broken, and they
        time out in combine. `reinitialize` on all ranks mends that.

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

    # ---------------------------------------------------------------- hooks of a backend

    @abc.abstractmethod
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
        """Exchange the tokens. Arguments are checked and may be non-contiguous; `tokens_per_rank`
        is this round's. In a backward rows may be narrower than those of the dispatch format.

        Raises MoEEpDisagreementError after closing the round on all ranks if they disagree.
        """

    @abc.abstractmethod
    def _combine(
        self,
        expert_output: Tensor,
        *,
        num_tokens: int,
        tokens_per_rank: int,
        output: Tensor | None,
        active_rank_mask: Tensor | None,
    ) -> Tensor:
        """Return the sums [num_tokens, hidden_size]: `output` with them in it, if it is given.

        expert_output: checked, [ep_size * tokens_per_rank, hidden_size], may be non-contiguous. In
            a backward also narrower, and float32: the sums are of its width and dtype.
        output: checked, no element of it shares memory with another; may be non-contiguous, and may
            overlap `expert_output`.

        A MoEEpInputError is raised last, when the exchange is done and `output` written: it closes
        the round. Any other MoEEpError but MoEEpTimeoutError means that nothing was exchanged: the
        round stays open.
        """

    def _abandon(self) -> bool:
        """End the open round on all ranks, whose combine raises MoEEpAbandonedError, when all have
        come. Return False, with nothing done, where they cannot be told.

        Is also called where the state knows of no round, since a compiled graph may have left one
        open, or has ended the one that it knows of. Then it raises MoEEpStateError, or returns
        False, if there is none.
        """
        return False

    def _check(self) -> None:
        """Wait for the device, then raise and clear what it recorded."""

    def _combine_input_buffer(self) -> Tensor | None:
        """Return combine's zero-copy input, [ep_size * tokens_per_rank, hidden_size], if any."""
        return None

    def _begin_shared_batch(self, topk_ids: Tensor) -> SharedBatch | None:
        """Begin a round of ranks that all hold the same tokens, of which none travels. None, with
        nothing done, where no rank can read what another makes, or there is no room.

        topk_ids: [n, top_k] int32 or int64, contiguous. Raises on all ranks, after closing the
            round: MoEEpDisagreementError where their ids differ, else MoEEpInputError for an id of
            no expert.
        """
        return None

    # ---------------------------------------------------------------- the state machine

    @autograd.records_dispatch
    def _run_dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None,
        *,
        hidden_states_scale: Tensor | None,
        runtime_max_tokens_per_rank: int | None,
        eplb_local_stats: Tensor | None,
        active_rank_mask: Tensor | None = None,
    ) -> MoEEpDispatchResult:
        self._traced = None
        traced = compiled_round.is_wanted(self)
        if not traced:
            self._close_left_open()
            self._require(IDLE, "dispatch")
        with self._without_gradients(traced):
            tokens_per_rank = checks.check_dispatch(
                self.params,
                self._row_format,
                device=self.device,
                ep_rank=self.ep_rank,
                extra_payload_bytes_per_token=self._extra_payload_bytes,
                eplb_stats_num_experts=self._eplb_stats_num_experts,
                hidden_states=hidden_states,
                topk_ids=topk_ids,
                topk_weights=topk_weights,
                hidden_states_scale=hidden_states_scale,
                runtime_max_tokens_per_rank=runtime_max_tokens_per_rank,
                eplb_local_stats=eplb_local_stats,
            )
        run: Callable[..., MoEEpDispatchResult] = partial(
            self._attempt, self._dispatch, before=IDLE, after=DISPATCHED
        )
        if traced:
            run = partial(compiled_round.dispatch, self)
        result = run(
            hidden_states,
            topk_ids,
            topk_weights,
            hidden_states_scale=hidden_states_scale,
            tokens_per_rank=tokens_per_rank,
            eplb_local_stats=eplb_local_stats,
            active_rank_mask=active_rank_mask,
        )
        self._num_tokens = hidden_states.shape[0]
        self._tokens_per_rank = tokens_per_rank
        self._recorded = None
        return result

    @autograd.records_combine
    def _run_combine(
        self,
        expert_output: Tensor,
        *,
        output: Tensor | None,
        active_rank_mask: Tensor | None = None,
    ) -> Tensor:
        self._require(DISPATCHED, "combine")
        compiled_round.require_traced_dispatch(self, expert_output)
        traced = compiled_round.is_open(self)
        with self._without_gradients(traced):
            checks.check_combine(
                self.params,
                device=self.device,
                ep_size=self.ep_size,
                num_tokens=self._num_tokens,
                tokens_per_rank=self._tokens_per_rank,
                expert_output=expert_output,
                output=output,
            )
        rows = expert_output.flatten(0, 1) if expert_output.dim() == 3 else expert_output
        run: Callable[..., Tensor] = partial(
            self._attempt, self._combine, before=DISPATCHED, after=IDLE
        )
        if traced:
            run = partial(compiled_round.combine, self)
        combined = run(
            rows,
            num_tokens=self._num_tokens,
            tokens_per_rank=self._tokens_per_rank,
            output=output,
            active_rank_mask=active_rank_mask,
        )
        self._recorded = None
        return combined

    def _run_begin_shared_batch(self, topk_ids: Tensor) -> SharedBatch | None:
        """Begin a round of ranks that hold the same tokens; see the hook. Without gradients."""
        self._close_left_open()
        self._require(IDLE, "dispatch")
        batch = self._attempt(
            self._begin_shared_batch, topk_ids.contiguous(), before=IDLE, after=DISPATCHED
        )
        if batch is None:
            self._in_round, self._shared.state = False, IDLE
        return batch

    def _run_end_shared_batch(self, batch: SharedBatch) -> Tensor:
        self._require(DISPATCHED, "combine")
        return self._attempt(batch.end, before=DISPATCHED, after=IDLE)

    def _drop_round(self) -> None:
        self._in_round = False
        self._recorded = None

    def _close_left_open(self) -> None:
        backward_round.close_left_open(self)

    def _without_gradients(self, traced: bool) -> torch.set_grad_enabled:
        """Return the context in which arguments are checked. In eager mode gradients have been
        recorded by now, or there are none."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and not traced)

    def _attempt(
        self, hook: Callable[..., Result], *args: Any, before: str, after: str, **kwargs: Any
    ) -> Result:
        """Return what a hook returns, in state `after`; `before` if it has exchanged nothing."""
        # Broken until the hook returns: an interrupt leaves the peers in another round.
        shared = self._shared
        shared.state = BROKEN
        try:
            result = hook(*args, **kwargs)
        except Exception as exc:
            self._settle(exc, before)
        self._in_round = after != IDLE
        shared.state = after
        return result

    def _settle(self, error: Exception, state_if_alive: str) -> NoReturn:
        """Raise a hook's exception again, and set the state that it leaves behind."""
        shared = self._shared
        # The library's: the op said so before it sent anything, or after all was done.
        breaks = isinstance(error, MoEEpTimeoutError | MoEEpMaskDisagreementError)
        try:
            if breaks or not is_of_library(error):
                shared.state = BROKEN
                shared.broken_by = _reason(error)
                raise error from None
            # Raised when a call has done its part of the exchange, which closes the round.
            recorded = isinstance(
                error, MoEEpInputError | MoEEpDisagreementError | MoEEpAbandonedError
            )
            closes_round = recorded and shared.state == BROKEN
            shared.state = IDLE if closes_round else state_if_alive
            self._in_round = self._in_round and not closes_round
            raise error from None
        finally:
            # This frame would hold it, and it its callers', until a garbage collection: what the
            # user's frames hold would end at any time, a CUDA graph within another's capture.
            del error

    def _require(self, state: str, call: str) -> None:
        if state == DISPATCHED and compiled_round.is_open(self):
            return  # the op will ask when it runs
        self._require_present(call)
        self._shared.require(state, call, in_round=self._in_round, who=self._who)


def _reason(error: BaseException) -> str:
    if isinstance(error, MoEEpError):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")
