"""How does a round go of ranks that hold the same tokens? None travels; see the backend's hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from moe_ep.workspaces import DISPATCHED, IDLE

if TYPE_CHECKING:
    from moe_ep.rounds import Rounds


class SharedBatch(NamedTuple):
    """A round of ranks that hold the same tokens.

    rows: [n, hidden_size], where this rank puts its sums for each token, zeros where it has none.
    end: ends the round, as a hook: returns what all ranks have put there, added up.
    """

    rows: Tensor
    end: Callable[[], Tensor]


def begin(communication: Rounds, topk_ids: Tensor) -> SharedBatch | None:
    """Begin such a round; see `_begin_shared_batch`. Without gradients."""
    communication._close_left_open()
    communication._require(IDLE, "dispatch")
    batch = communication._attempt(
        communication._begin_shared_batch, topk_ids.contiguous(), before=IDLE, after=DISPATCHED
    )
    if batch is None:
        communication._in_round, communication._shared.state = False, IDLE
    return batch


def end(communication: Rounds, batch: SharedBatch) -> Tensor:
    """End it, and return what all ranks have put there, added up."""
    communication._require(DISPATCHED, "combine")
    return communication._attempt(batch.end, before=DISPATCHED, after=IDLE)
