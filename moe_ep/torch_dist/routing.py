"""Which token of this rank goes to which rank, and which ids are wrong?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep.params import expert_partition


@dataclass(frozen=True)
class Routing:
    """What one rank sends in one round.

    ids: [n, top_k] int32: expert ids, and `invalid_expert_id` in every slot that names no expert.
    tokens: [sum(send_counts)] int64: the tokens for rank 0 in ascending order, then those for rank
        1, ...; a token is there once for each rank that it goes to.
    send_counts: how many of them go to each rank.
    input_error: names the first id that is neither an expert nor padding, and how many there are.
    """

    ids: Tensor
    tokens: Tensor
    send_counts: list[int]
    input_error: str | None


def owner_of_each_expert(num_experts: int, ep_size: int, device: torch.device) -> Tensor:
    """Return [num_experts] int64: the rank that owns each expert."""
    shares = [expert_partition(num_experts, ep_size, rank)[1] for rank in range(ep_size)]
    ranks = torch.arange(ep_size, device=device)
    return ranks.repeat_interleave(torch.tensor(shares, device=device))


@dataclass(frozen=True)
class Destinations:
    """What the ids say, without a wait for the device.

    ids: as in Routing.
    goes: [n, ep_size] bool: whether a token goes to a rank.
    is_wrong: [n, top_k] bool: ids that are neither an expert nor padding.
    """

    ids: Tensor
    goes: Tensor
    is_wrong: Tensor


def destinations(topk_ids: Tensor, owners: Tensor, ep_size: int, invalid_id: int) -> Destinations:
    """Return where each token goes. Does not wait for the device.

    topk_ids: [n, top_k] int32 or int64; owners: as `owner_of_each_expert` returns them.
    """
    names_expert = (topk_ids >= 0) & (topk_ids < owners.numel())
    # Slots that name no expert go to one rank too many, which is cut off.
    owner = owners[topk_ids.where(names_expert, 0).long()].where(names_expert, ep_size)
    goes = torch.zeros(topk_ids.shape[0], ep_size + 1, dtype=torch.bool, device=topk_ids.device)
    return Destinations(
        ids=topk_ids.where(names_expert, invalid_id).int(),
        goes=goes.scatter_(1, owner, True)[:, :ep_size],
        is_wrong=(topk_ids >= owners.numel()) & (topk_ids != invalid_id),
    )


def route(topk_ids: Tensor, owners: Tensor, ep_size: int, invalid_id: int, ep_rank: int) -> Routing:
    """Return where each token goes. Waits for the device once; otherwise as `destinations`."""
    found = destinations(topk_ids, owners, ep_size, invalid_id)
    # On a GPU this is the round's only wait: the sizes of the exchange must be known on the host.
    sums = torch.cat([found.goes.sum(0), found.is_wrong.sum().view(1)])
    *send_counts, num_wrong = sums.tolist()
    input_error = None
    if num_wrong > 0:
        token, slot = found.is_wrong.nonzero()[0].tolist()
        wrong = WrongIds(num_wrong, token, slot, int(topk_ids[token, slot]))
        input_error = wrong.message(owners.numel(), ep_rank)
    by_rank = torch.nonzero_static(found.goes.t(), size=sum(send_counts))
    return Routing(found.ids, by_rank[:, 1], send_counts, input_error)


@dataclass(frozen=True)
class WrongIds:
    """How many ids were neither an expert nor padding, and where the first of them was."""

    count: int
    token: int
    slot: int
    expert: int

    def message(self, num_experts: int, ep_rank: int) -> str:
        """Return what the user is told."""
        return (
            f"rank {ep_rank} passed {self.count} expert id(s) outside [0, {num_experts}), the "
            f"first at token {self.token}, slot {self.slot}: {self.expert}. These slots were "
            "skipped. Use a negative id or invalid_expert_id for padding."
        )


class WrongIdsOnDevice:
    """Counts wrong ids without a wait for the device, for rounds that the host takes no part in."""

    def __init__(self, device: torch.device) -> None:
        self._words = torch.zeros(4, dtype=torch.int64, device=device)

    def add(self, topk_ids: Tensor, is_wrong: Tensor) -> None:
        """Count those of a round; the first of all stays the first."""
        if topk_ids.numel() == 0:
            return
        top_k = topk_ids.shape[1]
        place = is_wrong.flatten().int().argmax()
        # Not [place], which would bring the index to the host.
        expert = topk_ids.flatten().index_select(0, place).squeeze(0).long()
        found = torch.stack([is_wrong.sum(), place // top_k, place % top_k, expert])
        count = self._words[:1]
        first = torch.where(count > 0, self._words[1:], found[1:])
        self._words.copy_(torch.cat([count + found[:1], first]))

    def take(self) -> WrongIds | None:
        """Return what was counted since the last call. Waits for the device."""
        count, token, slot, expert = self._words.tolist()
        if count == 0:
            return None
        self._words.zero_()
        return WrongIds(count, token, slot, expert)
