"""What does every rank give to a round?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep import MoEEpCommParams


@dataclass(frozen=True, kw_only=True)
class Round:
    """What every rank gives to one round; a sequence has one entry for each rank.

    tokens_per_rank: runtime_max_tokens_per_rank.
    active_ranks: the ranks that are not masked off; None: no mask is given.
    mask_on_device: give the mask in the communication's memory; else in the CPU's.
    """

    hidden_states: Sequence[Tensor]
    topk_ids: Sequence[Tensor]
    topk_weights: Sequence[Tensor] | None = None
    scales: Sequence[Tensor] | None = None
    tokens_per_rank: int | None = None
    eplb_local_stats: Sequence[Tensor] | None = None
    active_ranks: Sequence[int] | None = None
    mask_on_device: bool = False

    @property
    def ep_size(self) -> int:
        return len(self.topk_ids)


def rows_of(values: Sequence[float], width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return [len(values), width]: one number describes a row."""
    return torch.tensor(values, dtype=torch.float32).view(-1, 1).repeat(1, width).to(dtype)


def ids_of(ids: Sequence[Sequence[int]], top_k: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return [n, top_k], also where n is 0."""
    return torch.tensor(ids, dtype=torch.int64).view(-1, top_k).to(dtype)


def random_rows(count: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return [count, width] of random bytes or, for the wider dtypes, of random finite numbers.

    Among them are zeros of both signs and tiny and huge numbers.
    """
    if dtype.itemsize == 1:
        content = torch.randint(0, 256, (count, width), dtype=torch.uint8, generator=generator)
        return content.view(dtype)
    values = torch.randn(count, width, generator=generator)
    magnitude = torch.randint(-6, 7, (count, width), generator=generator)
    values = torch.where(magnitude == 6, -0.0, torch.ldexp(values, magnitude))
    return values.to(dtype)


def random_round(
    params: MoEEpCommParams,
    num_tokens: Sequence[int],
    seed: int,
    *,
    id_dtype: torch.dtype = torch.int32,
    with_weights: bool = True,
    tokens_per_rank: int | None = None,
    padding: float = 0.1,
    local_share: float = 0.0,
) -> Round:
    """Return a round of random tokens for ranks with these numbers of them.

    padding: share of slots that are padding, in its several forms.
    local_share: share of slots that pick from the first two experts, so that ids repeat.
    """
    g = torch.Generator().manual_seed(seed)
    row, top_k = params.row_format, params.top_k
    paddings = torch.tensor([-1, -7, -(2**31), params.invalid_expert_id])
    ids = []
    for n in num_tokens:
        picks = torch.randint(0, params.num_experts, (n, top_k), generator=g)
        picks = torch.where(torch.rand(n, top_k, generator=g) < local_share, picks % 2, picks)
        picks = picks.clamp(max=params.num_experts - 1)
        empty = paddings[torch.randint(0, len(paddings), (n, top_k), generator=g)]
        picks = torch.where(torch.rand(n, top_k, generator=g) < padding, empty, picks)
        ids.append(picks.to(id_dtype))
    return Round(
        hidden_states=[
            random_rows(n, row.value_columns, row.value_dtypes[0], g) for n in num_tokens
        ],
        topk_ids=ids,
        topk_weights=(
            [torch.randn(n, top_k, generator=g) for n in num_tokens] if with_weights else None
        ),
        scales=(
            [random_rows(n, row.scale_columns, row.scale_dtypes[0], g) for n in num_tokens]
            if row.scale_columns
            else None
        ),
        tokens_per_rank=tokens_per_rank,
    )
