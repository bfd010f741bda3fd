"""What do ranks tell each other before a round's rows, so that they find out if they disagree?"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from moe_ep.collectives import by_rank
from moe_ep.errors import MoEEpDisagreementError


@dataclass(frozen=True)
class RoundHeader:
    """One source's view of a round, the same to every peer. Travels as int64."""

    epoch: int
    num_tokens: int
    tokens_per_rank: int
    row_bytes: int
    scale_bytes: int
    has_weights: int
    has_stats: int

    def what_must_agree(self) -> tuple[int, ...]:
        """Return the fields that must be equal on all ranks."""
        return tuple(getattr(self, field) for field in _MUST_AGREE)


# What a user would call the fields that must be equal on all ranks.
_MUST_AGREE = {
    "tokens_per_rank": "runtime_max_tokens_per_rank",
    "row_bytes": "bytes of a hidden_states row",
    "scale_bytes": "bytes of a hidden_states_scale row",
    "has_weights": "topk_weights given",
    "has_stats": "eplb_local_stats given",
}

_NUM_FIELDS = len(fields(RoundHeader))


def pack_headers(header: RoundHeader, row_counts: list[int], stats: Tensor) -> Tensor:
    """Return [ep_size, words] int64 on the CPU: for each peer its row count, the header, the stats.

    stats: [eplb_stats_num_experts] on the CPU, zeros where there are none.
    """
    same_for_all = torch.cat([torch.tensor(astuple(header), device="cpu"), stats.long()])
    words = same_for_all.expand(len(row_counts), -1)
    return torch.cat([torch.tensor(row_counts, device="cpu").view(-1, 1), words], dim=1)


def unpack_headers(words: Tensor) -> tuple[list[int], list[RoundHeader], Tensor]:
    """Return each source's row count for this rank, its header, and stats [ep_size, *] int32."""
    num_stats = words.shape[1] - 1 - _NUM_FIELDS
    counts, headers, stats = torch.split(words, [1, _NUM_FIELDS, num_stats], dim=1)
    return (
        counts.flatten().tolist(),
        [RoundHeader(*row) for row in headers.tolist()],
        stats.int(),
    )


def require_agreement(headers: list[RoundHeader]) -> None:
    """Raise MoEEpDisagreementError with every rank's values where they disagree about the round."""
    disagreements = []
    for field, name in _MUST_AGREE.items():
        given = {rank: getattr(header, field) for rank, header in enumerate(headers)}
        if len(set(given.values())) > 1:
            if field.startswith("has_"):
                given = {rank: "yes" if value else "no" for rank, value in given.items()}
            disagreements.append(f"{name}: {by_rank(given)}")
    if disagreements:
        raise MoEEpDisagreementError(
            f"the ranks disagree about this round: {' | '.join(disagreements)}. "
            "Nothing was exchanged; pass equal values on all ranks."
        )
