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


def route(topk_ids: Tensor, owners: Tensor, ep_size: int, invalid_id: int, ep_rank: int) -> Routing:
    """Return where each token goes. Waits for the device once.

    topk_ids: [n, top_k] int32 or int64; owners: as `owner_of_each_expert` returns them.
    """
    num_tokens = topk_ids.shape[0]
    names_expert = (topk_ids >= 0) & (topk_ids < owners.numel())
    is_wrong = (topk_ids >= owners.numel()) & (topk_ids != invalid_id)

    # Slots that name no expert go to one rank too many, which is cut off.
    owner = owners[topk_ids.where(names_expert, 0).long()].where(names_expert, ep_size)
    goes = torch.zeros(num_tokens, ep_size + 1, dtype=torch.bool, device=topk_ids.device)
    goes = goes.scatter_(1, owner, True)[:, :ep_size]

    # On a GPU this is the round's only wait: the sizes of the exchange must be known on the host.
    *send_counts, num_wrong = torch.cat([goes.sum(0), is_wrong.sum().view(1)]).tolist()
    by_rank = torch.nonzero_static(goes.t(), size=sum(send_counts))
    return Routing(
        ids=topk_ids.where(names_expert, invalid_id).int(),
        tokens=by_rank[:, 1],
        send_counts=send_counts,
        input_error=_describe(topk_ids, is_wrong, num_wrong, owners.numel(), ep_rank),
    )


def _describe(
    topk_ids: Tensor, is_wrong: Tensor, num_wrong: int, num_experts: int, ep_rank: int
) -> str | None:
    if num_wrong == 0:
        return None
    token, slot = is_wrong.nonzero()[0].tolist()
    return (
        f"rank {ep_rank} passed {num_wrong} expert id(s) outside [0, {num_experts}), the first at "
        f"token {token}, slot {slot}: {int(topk_ids[token, slot])}. These slots were skipped. Use "
        "a negative id or invalid_expert_id for padding."
    )
