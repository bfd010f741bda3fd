"""How does a round end whose experts have raised? Without sums, on all ranks at once.

Peers wait in combine for the rank, and must not go on with sums that lack its part: they raise,
too. See MoEEpCommunication.abandon_round.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from moe_ep.errors import MoEEpError, MoEEpInputError, MoEEpStateError
from moe_ep.workspaces import DISPATCHED, IDLE

if TYPE_CHECKING:
    from moe_ep.communication import MoEEpCommunication

Result = TypeVar("Result")


def abandoning(communication: MoEEpCommunication, step: Callable[[], Result]) -> Result:
    """Return what a step returns that follows a dispatch: the experts, or combine. Where it raises
    and leaves the round open, abandon that before the exception goes on. In a compiled graph a step
    is its ops, and nobody is there to do so.
    """
    if torch.compiler.is_compiling():
        return step()
    try:
        return step()
    except Exception:
        with contextlib.suppress(MoEEpError):  # the next call says what became of it
            communication.abandon_round()
        raise


def abandon(communication: MoEEpCommunication) -> None:
    """Abandon the round that is open, if it is the communication's."""
    shared = communication._shared
    is_open = shared.state == DISPATCHED and communication._in_round
    # A compiled graph that raises leaves the state as it was before the graph: its ops are asked.
    if communication._destroyed or not (is_open or shared.state == IDLE):
        return
    communication._require_present("abandon_round")
    communication._recorded = None
    try:
        is_over = communication._attempt(
            partial(_end_on_all, communication, is_open), before=IDLE, after=IDLE
        )
    except MoEEpStateError:  # of the op: there is no round
        communication._in_round, is_over = False, True
    if is_open and not is_over:
        shared.break_down(
            f"its round was abandoned on this rank{_because()}, of which the peers cannot be told "
            f"here (backend {communication.backend_name}, {communication.device.type}): they wait "
            "in combine until they time out."
        )


def _end_on_all(communication: MoEEpCommunication, is_open: bool) -> bool:
    """End the round, as a hook. Return False where peers cannot be told."""
    is_alone = is_open and communication.ep_size == 1
    return communication._abandon() or (is_alone and _end_alone(communication))


def _end_alone(communication: MoEEpCommunication) -> bool:
    """The same where there are no peers, on any backend and device: nobody gets the sums."""
    params, tokens_per_rank = communication.params, communication._tokens_per_rank
    zero = torch.zeros((), dtype=params.token_dtype, device=communication.device)
    with contextlib.suppress(MoEEpInputError):  # of ids that the dispatch got
        communication._combine(
            zero.expand(tokens_per_rank, params.hidden_size),
            num_tokens=communication._num_tokens,
            tokens_per_rank=tokens_per_rank,
            output=None,
            active_rank_mask=None,
        )
    return True


def _because() -> str:
    """Return what is being handled, for a message."""
    error = sys.exc_info()[1]
    return "" if error is None else f" by {type(error).__name__}: {error}".removesuffix(": ")
