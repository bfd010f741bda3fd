"""Do received rows get to their local experts' groups and back exactly, for every shape?"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_ep import (
    BootstrapConfig,
    ExpertMajorRows,
    MoEEpCommParams,
    MoEEpDispatchResult,
    MoEEpStateError,
    TorchDistAlltoAll,
    pick_groups,
)
from moe_ep.expert_major import permute_to_experts, unpermute_from_experts

FIRST, COUNT, INVALID = 4, 3, -1


def received(
    num_rows: int,
    top_k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    scales: int = 0,
) -> MoEEpDispatchResult:
    """Rows of a rank that owns experts 4 to 6 of ten; ids repeat, and some rows have no token."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 10, (num_rows, top_k), generator=g, dtype=torch.int32)
    ids[torch.rand(num_rows, generator=g) < 0.2] = INVALID
    rows = torch.randn(num_rows, 24, generator=g)
    rows[(ids == INVALID).all(1)] = float("nan")  # unspecified
    return MoEEpDispatchResult(
        hidden_states=rows.to(dtype),
        topk_ids=ids,
        topk_weights=torch.randn(num_rows, top_k, generator=g),
        tokens_per_rank=num_rows,
        hidden_states_scale=torch.randn(num_rows, scales, generator=g) if scales else None,
        eplb_gathered_stats=None,
        recv_token_counts=torch.tensor([num_rows], dtype=torch.int32),
    )


def picks_of(result: MoEEpDispatchResult) -> list[list[tuple[int, int]]]:
    """For each local expert the (row, slot) of its picks, in order."""
    picks: list[list[tuple[int, int]]] = [[] for _ in range(COUNT)]
    for row, ids in enumerate(result.topk_ids.tolist()):
        for slot, expert in enumerate(ids):
            if FIRST <= expert < FIRST + COUNT:
                picks[expert - FIRST].append((row, slot))
    return picks


def same(got: Tensor, wanted: Tensor) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


shapes = pytest.mark.parametrize(
    ("num_rows", "top_k"), [(0, 2), (1, 1), (7, 3), (40, 8), (33, 32)], ids=str
)


@shapes
@pytest.mark.parametrize("alignment", [1, 8, 128])
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [(torch.bfloat16, 0), (torch.float32, 0), (torch.float8_e4m3fn, 3)],
    ids=str,
)
def test_each_pick_has_its_row(
    num_rows: int, top_k: int, alignment: int, dtype: torch.dtype, scales: int
) -> None:
    result = received(num_rows, top_k, dtype=dtype, scales=scales)
    permuted = permute_to_experts(result, FIRST, COUNT, alignment=alignment)
    room = permuted.hidden_states.shape[0]
    rows = torch.zeros(room, 24).to(dtype)
    row_scales = torch.zeros(room, scales)
    weights, experts = torch.zeros(room), torch.full((room,), -1, dtype=torch.int32)
    row_of_pick = torch.full((num_rows, top_k), room)
    offsets, counts = [0], []
    assert result.topk_weights is not None
    for expert, picks in enumerate(picks_of(result)):
        for i, (row, slot) in enumerate(picks):
            at = offsets[-1] + i
            rows.view(torch.uint8)[at] = result.hidden_states.view(torch.uint8)[row]
            if result.hidden_states_scale is not None:
                row_scales[at] = result.hidden_states_scale[row]
            weights[at], experts[at] = result.topk_weights[row, slot], expert
            row_of_pick[row, slot] = at
        counts.append(len(picks))
        offsets.append(offsets[-1] + (len(picks) + alignment - 1) // alignment * alignment)
    assert offsets[-1] <= room
    same(permuted.hidden_states, rows)
    assert (permuted.hidden_states_scale is None) == (scales == 0)
    if permuted.hidden_states_scale is not None:
        same(permuted.hidden_states_scale, row_scales)
    assert permuted.topk_weights is not None
    same(permuted.topk_weights, weights)
    same(permuted.expert_of_row, experts)
    same(permuted.row_of_pick, row_of_pick)
    same(permuted.expert_counts, torch.tensor(counts, dtype=torch.int32))
    same(permuted.expert_offsets, torch.tensor(offsets, dtype=torch.int32))
    assert permuted.is_incomplete is None


def test_ids_and_weights_of_other_dtypes_are_taken_for_what_they_are() -> None:
    result = received(40, 8)
    assert result.topk_weights is not None
    ids = result.topk_ids.long()
    ids[0, 0] += 2**32  # no expert, though its low half is one's
    ids[1, 0] -= 2**32
    plain = torch.where((ids < 0) | (ids > 9), INVALID, ids).int()
    coarse = result.topk_weights.bfloat16()
    given = replace(result, topk_ids=ids, topk_weights=coarse)
    usual = replace(result, topk_ids=plain, topk_weights=coarse.float())
    got, wanted = (permute_to_experts(one, FIRST, COUNT) for one in (given, usual))
    same(got.hidden_states, wanted.hidden_states)
    same(got.expert_of_row, wanted.expert_of_row)
    rows = got.hidden_states
    same(unpermute_from_experts(rows, got), unpermute_from_experts(rows, wanted))


def test_rows_are_grouped_where_they_are_whatever_the_default_device_is() -> None:
    result = received(7, 3)
    with torch.device("meta"):
        permuted = permute_to_experts(result, FIRST, COUNT)
        got = unpermute_from_experts(permuted.hidden_states, permuted)
    wanted = permute_to_experts(result, FIRST, COUNT)
    same(got, unpermute_from_experts(wanted.hidden_states, wanted))


def summed(rows: Tensor, weights: Tensor | None, permuted: ExpertMajorRows) -> Tensor:
    total = torch.zeros(len(permuted.row_of_pick), rows.shape[1])
    for row, places in enumerate(permuted.row_of_pick.tolist()):
        for slot, at in enumerate(places):
            if at < len(rows):
                part = rows[at].float()
                total[row] += part if weights is None else part * weights[row, slot]
    return total.to(rows.dtype)


@shapes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("apply_weights", [True, False])
def test_rows_come_back_as_sums_over_their_picks(
    num_rows: int, top_k: int, dtype: torch.dtype, apply_weights: bool
) -> None:
    result = received(num_rows, top_k)
    permuted = permute_to_experts(result, FIRST, COUNT, alignment=4)
    rows = torch.randn(permuted.hidden_states.shape[0], 5).to(dtype)
    rows[permuted.expert_of_row < 0] = float("nan")  # not read
    got = unpermute_from_experts(rows, permuted, apply_weights=apply_weights)
    same(got, summed(rows, result.topk_weights if apply_weights else None, permuted))


def test_gradients_are_those_of_the_plain_sums() -> None:
    result = received(33, 8, dtype=torch.float32)
    assert result.topk_weights is not None
    hidden = result.hidden_states.nan_to_num().requires_grad_()
    weights = result.topk_weights.clone().requires_grad_()
    given = MoEEpDispatchResult(
        **{**vars(result), "hidden_states": hidden, "topk_weights": weights}
    )
    factor = torch.randn(COUNT, 24)
    grad = torch.randn(33, 24)

    permuted = permute_to_experts(given, FIRST, COUNT, alignment=8)
    rows = permuted.hidden_states * factor[permuted.expert_of_row.clamp(min=0)]
    unpermute_from_experts(rows, permuted).backward(grad)
    ours = hidden.grad, weights.grad
    hidden.grad = weights.grad = None

    total = torch.zeros(33, 24)
    for slot in range(8):
        expert = result.topk_ids[:, slot].long() - FIRST
        is_local = ((expert >= 0) & (expert < COUNT)).view(-1, 1)
        part = hidden * factor[expert.clamp(0, COUNT - 1)] * weights[:, slot : slot + 1]
        total = torch.where(is_local, total + part, total)
    total.backward(grad)
    for got, wanted in zip(ours, (hidden.grad, weights.grad), strict=True):
        assert got is not None
        assert wanted is not None
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-5)


def test_weights_that_the_experts_apply_get_their_gradients() -> None:
    result = received(9, 4)
    assert result.topk_weights is not None
    weights = result.topk_weights.clone().requires_grad_()
    given = MoEEpDispatchResult(**{**vars(result), "topk_weights": weights})
    permuted = permute_to_experts(given, FIRST, COUNT)
    assert permuted.topk_weights is not None
    permuted.topk_weights.sum().backward()
    ids = result.topk_ids
    assert weights.grad is not None
    same(weights.grad, ((ids >= FIRST) & (ids < FIRST + COUNT)).float())


def test_what_finds_no_room_is_seen_and_comes_back_as_nan() -> None:
    result = received(40, 8)
    whole = permute_to_experts(result, FIRST, COUNT, alignment=8)
    room = 48
    permuted = permute_to_experts(result, FIRST, COUNT, alignment=8, max_rows=room)
    assert int(whole.expert_offsets[-1]) > room
    same(permuted.hidden_states, whole.hidden_states[:room])
    same(permuted.expert_offsets, whole.expert_offsets.clamp(max=room))
    kept = [(whole.expert_of_row[:room] == expert).sum() for expert in range(COUNT)]
    same(permuted.expert_counts, torch.stack(kept).int())
    is_local = (result.topk_ids >= FIRST) & (result.topk_ids < FIRST + COUNT)
    lost = (is_local & (whole.row_of_pick >= room)).any(1)
    assert permuted.is_incomplete is not None
    same(permuted.is_incomplete, lost)
    assert 0 < int(lost.sum()) < 40
    back = unpermute_from_experts(permuted.hidden_states, permuted)
    assert back[lost].isnan().all()
    same(back[~lost], unpermute_from_experts(whole.hidden_states, whole)[~lost])


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2], ids=str)
def test_rows_of_any_dtype_may_be_none_at_all(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(pick_groups, "host_may_read", lambda tensor: False)  # as on a device
    rows = torch.empty(0, 24, dtype=torch.uint8).view(dtype)
    permuted = permute_to_experts(replace(received(0, 2), hidden_states=rows), FIRST, COUNT)
    assert permuted.hidden_states.dtype == dtype
    assert permuted.hidden_states.shape == (0, 24)


def test_room_for_all_costs_nothing_more_than_is_needed() -> None:
    result = received(40, 8)
    whole = permute_to_experts(result, FIRST, COUNT, alignment=8)
    assert whole.hidden_states.shape[0] == (40 * 8 + COUNT * 7) // 8 * 8
    same(
        permute_to_experts(result, FIRST, COUNT, alignment=8, max_rows=10**6 // 8 * 8).row_of_pick,
        whole.row_of_pick,
    )


@pytest.mark.parametrize("max_rows", [None, 8])
def test_shapes_and_dtypes_can_be_asked_for_without_values(max_rows: int | None) -> None:
    """In torch's FakeTensorMode, as who plans memory does."""

    def there_and_back(result: MoEEpDispatchResult) -> list[Tensor]:
        permuted = permute_to_experts(result, FIRST, COUNT, alignment=8, max_rows=max_rows)
        back = unpermute_from_experts(permuted.hidden_states, permuted)
        parts = (getattr(permuted, one.name) for one in fields(permuted))
        return [*(part for part in parts if part is not None), back]

    result = received(7, 3)
    with FakeTensorMode() as mode:
        given = {
            one.name: getattr(result, one.name)
            for one in fields(result)
            if isinstance(getattr(result, one.name), Tensor)
        }
        fakes = {name: mode.from_tensor(tensor) for name, tensor in given.items()}
        faked = there_and_back(replace(result, **fakes))
    real = there_and_back(result)
    if max_rows is not None:
        del real[-2]  # is_incomplete, where values have said that some pick has no room
    assert [(f.shape, f.dtype) for f in faked] == [(r.shape, r.dtype) for r in real]


def test_a_round_with_grouped_products_is_that_of_its_experts() -> None:
    params = MoEEpCommParams(6, 2, 20, 16)
    g = torch.Generator().manual_seed(1)
    x = torch.randint(-4, 5, (20, 16), generator=g).bfloat16()
    ids = torch.randint(0, 6, (20, 2), generator=g)
    weights = torch.randint(1, 4, (20, 2), generator=g).float()
    experts = torch.randint(-2, 3, (6, 16, 16), generator=g).bfloat16()
    with TorchDistAlltoAll(BootstrapConfig(1, 0, device="cpu"), params) as comm:
        result = comm.dispatch(x, ids, weights)
        permuted = comm.permute_to_experts(result, alignment=16)
        rows = torch.nn.functional.grouped_mm(
            permuted.hidden_states, experts, offs=permuted.expert_offsets[1:]
        )
        sums = comm.combine(comm.unpermute_from_experts(rows, permuted))
        with pytest.raises(MoEEpStateError, match="permute_to_experts"):
            comm.permute_to_experts(result)
    wanted = torch.einsum("nh,nkhj->nkj", x.float(), experts[ids].float()) * weights[..., None]
    same(sums, (wanted[:, 0] + wanted[:, 1]).bfloat16())
