"""How does a call of a round go? Its checks, the hook of the backend, and the state that it leaves.

The state belongs to the workspace, which several objects may share (`moe_ep.workspaces`). All that
the compiled path touches of it is plain attributes (int, str), so that torch.compile traces a whole
round into one graph.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final, NoReturn, TypeVar

import torch
from torch import Tensor

from moe_ep import autograd, backward_round, checks, compiled_round, graph_names
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.collectives import CommBackend
from moe_ep.config import CommunicationConfig
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
from moe_ep.life_cycle import LifeCycle
from moe_ep.params import MoEEpCommParams, expert_partition
from moe_ep.shared_batch import SharedBatch
from moe_ep.workspaces import BROKEN, DISPATCHED, IDLE

Result = TypeVar("Result")


class Rounds(LifeCycle):
    """The part of `MoEEpCommunication` that plays rounds, by the hooks of a backend. What these get
    and how they report failures stands there.
    """

    _has_graph_ops: ClassVar[bool] = False
    """True: `_dispatch` and `_combine` can be traced; else compiled graphs have ops that call them,
    see `moe_ep.compiled_round`, which they have for gradients in any case."""

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        config: CommunicationConfig,
        comm: CommBackend,
        *,
        extra_payload_bytes_per_token: int,
        eplb_stats_num_experts: int,
    ) -> None:
        """Begin with no round open. The arguments are those that the group has agreed on, see
        MoEEpCommunication.

        comm: what the group agrees over.
        """
        super().__init__(bootstrap, config, comm)
        first, count = expert_partition(params.num_experts, self.ep_size, self.ep_rank)
        self.params: Final = params
        self.first_local_expert: Final[int] = first
        self.num_local_experts: Final[int] = count
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

        A MoEEpInputError is raised last, when the exchange is done and `output` written. It closes
        the round, and so do MoEEpDisagreementError and MoEEpAbandonedError, without sums. Any other
        MoEEpError but MoEEpTimeoutError means that nothing was exchanged: the round stays open.
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

        topk_ids: [n, top_k] int32 or int64, contiguous.

        Raises on all ranks, with the round over: MoEEpDisagreementError where their ids differ,
        MoEEpInputError where they are the same and one is of no expert.
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
