"""Are sums over picks the same bits whichever way they are taken?"""

from __future__ import annotations

import pytest
import torch

from moe_ep import pick_sums
from tests.bits import assert_same_bits

NUM_ROWS, TOP_K, NUM_SOURCES = 41, 5, 70


@pytest.mark.parametrize("width", [0, 1, 6, 64, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("is_weighted", [True, False])
def test_sums_on_the_host_are_those_slot_by_slot(
    width: int, dtype: torch.dtype, is_weighted: bool
) -> None:
    g = torch.Generator().manual_seed(width)
    rows = torch.randn(NUM_SOURCES, width, generator=g).to(dtype)
    rows[3] = -0.0
    rows[4] = float("inf")
    # A third of the picks have no row, and some rows no pick.
    row_of_pick = torch.randint(0, NUM_SOURCES * 3 // 2, (NUM_ROWS, TOP_K), generator=g)
    row_of_pick = row_of_pick.clamp(max=NUM_SOURCES)
    row_of_pick[5:9] = NUM_SOURCES
    row_of_pick[10] = 3
    weights = torch.randn(NUM_ROWS, TOP_K, generator=g) if is_weighted else None
    wanted = pick_sums._slot_by_slot(rows, weights, row_of_pick)
    assert not wanted.isnan().any()  # those have bits of their own
    assert_same_bits(pick_sums.sum_of_picks(rows, weights, row_of_pick), wanted)
    apart = torch.full((NUM_ROWS, width + 3), 7.0, dtype=dtype)[:, :width]
    pick_sums.sum_of_picks(rows, weights, row_of_pick, apart)
    assert_same_bits(apart[:5], wanted[:5])
    assert (apart[5:9] == 7).all()
