"""Are sums over picks the same bits whichever way they are taken, in pieces of any length?"""

from __future__ import annotations

import pytest
import torch

from moe_ep import pick_sums
from tests.bits import assert_same_bits

NUM_ROWS, TOP_K, WIDTH, NUM_SOURCES = 41, 5, 6, 70


@pytest.mark.parametrize("rows_at_once", [1, 3, 41, 1000])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_pieces_on_the_host_are_the_sums_slot_by_slot(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int, is_weighted: bool
) -> None:
    g = torch.Generator().manual_seed(rows_at_once)
    rows = torch.randn(NUM_SOURCES, WIDTH, generator=g).bfloat16()
    rows[3] = -0.0
    rows[4] = float("inf")
    # A third of the picks have no row, and some rows no pick.
    row_of_pick = torch.randint(0, NUM_SOURCES * 3 // 2, (NUM_ROWS, TOP_K), generator=g)
    row_of_pick = row_of_pick.clamp(max=NUM_SOURCES)
    row_of_pick[5:9] = NUM_SOURCES
    row_of_pick[10] = 3
    weights = torch.randn(NUM_ROWS, TOP_K, generator=g) if is_weighted else None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(pick_sums, "_ELEMENTS_AT_ONCE", rows_at_once * WIDTH)
    got = pick_sums.sum_of_picks(rows, weights, row_of_pick)
    assert_same_bits(got, pick_sums._slot_by_slot(rows, weights, row_of_pick))
