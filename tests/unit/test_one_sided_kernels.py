"""Do the one-sided ops on a bare workspace keep the contract? Ranks are threads over a plain
tensor.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import (
    MoEEpCommParams,
    MoEEpConfigError,
    MoEEpStateError,
    MoEEpTimeoutError,
    QuantFormat,
)
from moe_ep.cake import kernels
from moe_ep.quantization import BLOCK_FORMATS, ScaleLayout, quantize_rows
from moe_ep.reference import evaluate_experts, reference_combine, reference_dispatch
from tests.backends import ALL, Backend
from tests.bits import assert_same_bits
from tests.rounds import Round, random_round, random_rows, rows_of

SECONDS = 60
GUARD = 0xA5


@pytest.fixture(autouse=True, params=[one for one in ALL if one.one_sided], ids=str)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Let `kernels` be the module of each backend by turns."""
    one: Backend = request.param
    monkeypatch.setattr(sys.modules[__name__], "kernels", one.kernels)
    return one


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Hundreds of ranks with a thread pool each would only get into each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Group:
    """Ranks as threads of this process, over one workspace with guard bytes behind each row."""

    def __init__(self, params: MoEEpCommParams, size: int, *, extra_bytes: int = 0) -> None:
        self.params, self.size = params, size
        self.geometry = kernels.Geometry(
            ep_size=size,
            num_experts=params.num_experts,
            top_k=params.top_k,
            max_tokens_per_rank=params.max_tokens_per_rank,
            dispatch_bytes_per_token=params.dispatch_bytes_per_token + extra_bytes,
            combine_bytes_per_token=params.combine_bytes_per_token,
        )
        self.row_bytes = kernels.workspace_size_per_rank(self.geometry)
        memory = torch.full((size, self.row_bytes + 4096), GUARD, dtype=torch.uint8)
        # A workspace starts on a cache line; what the allocator gives does not have to.
        assert memory.data_ptr() % 64 == 0
        self.memory = memory
        self.workspace = memory[:, : self.row_bytes]
        self.barrier = threading.Barrier(size)

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Return what `body(rank)` returned on each rank's thread, after initialisation."""

        def initialised(rank: int) -> Any:
            kernels.initialize(self.workspace, self.geometry, rank)
            self.barrier.wait(SECONDS)
            return body(rank)

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(initialised, range(self.size), timeout=3 * SECONDS))

    def guards_are_whole(self) -> bool:
        return bool((self.memory[:, self.row_bytes :] == GUARD).all())


def copies_of(got: kernels.ReceivedTokens) -> kernels.ReceivedTokens:
    """What is valid until combine only, to keep."""

    def copy(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.clone()

    return kernels.ReceivedTokens(
        [rows.clone() for rows in got.payloads],
        got.topk_ids.clone(),
        copy(got.topk_weights),
        got.recv_token_counts.clone(),
        copy(got.eplb_gathered_stats),
    )


def play(
    group: Group, rounds: Sequence[Round], partials: Sequence[Sequence[Tensor]]
) -> list[list[tuple[kernels.ReceivedTokens, Tensor]]]:
    """Return what each rank got in each round: copies of the received rows, and the sums.

    partials: the expert output of each round and rank.
    """
    params, size = group.params, group.size

    def body(rank: int) -> list[tuple[kernels.ReceivedTokens, Tensor]]:
        played = []
        for one, partial in zip(rounds, partials, strict=True):
            group.barrier.wait(SECONDS)  # nobody may be masked off who has still to read
            mask = None
            if one.active_ranks is not None:
                if rank not in one.active_ranks:
                    continue
                mask = kernels.active_rank_mask(one.active_ranks, size)
            got = kernels.dispatch(
                group.workspace,
                group.geometry,
                rank,
                one.topk_ids[rank],
                [rows[rank] for rows in (one.hidden_states, one.scales) if rows is not None],
                None if one.topk_weights is None else one.topk_weights[rank],
                tokens_per_rank=one.tokens_per_rank,
                invalid_expert_id=params.invalid_expert_id,
                active_rank_mask=mask,
                timeout_sec=SECONDS,
            )
            got = copies_of(got)
            combined = kernels.combine(
                group.workspace,
                group.geometry,
                rank,
                partial[rank],
                len(one.topk_ids[rank]),
                active_rank_mask=mask,
                timeout_sec=SECONDS,
            )
            assert isinstance(combined, Tensor)
            played.append((got, combined))
        return played

    return group.run(body)


def oracle(params: MoEEpCommParams, one: Round) -> list[Any]:
    return list(
        reference_dispatch(
            params,
            one.ep_size,
            one.hidden_states,
            one.topk_ids,
            one.topk_weights,
            hidden_states_scale=one.scales,
            tokens_per_rank=one.tokens_per_rank,
            active_ranks=one.active_ranks,
        )
    )


def play_and_check(group: Group, rounds: Sequence[Round]) -> None:
    params, size = group.params, group.size
    wanted_of_round = [oracle(params, one) for one in rounds]
    partials = [
        [evaluate_experts(params, size, rank, wanted[rank]) for rank in range(size)]
        for wanted in wanted_of_round
    ]
    by_rank = play(group, rounds, partials)
    for index, (one, wanted, partial) in enumerate(
        zip(rounds, wanted_of_round, partials, strict=True)
    ):
        sums = reference_combine(
            params,
            size,
            one.topk_ids,
            partial,
            tokens_per_rank=wanted[0].tokens_per_rank,
            active_ranks=one.active_ranks,
        )
        for rank in range(size) if one.active_ranks is None else one.active_ranks:
            got, combined = by_rank[rank][index]
            want = wanted[rank]
            filled = torch.arange(want.tokens_per_rank) < want.recv_token_counts[:, None]
            rows = filled.flatten()
            assert_same_bits(got.recv_token_counts, want.recv_token_counts, rank=rank)
            assert_same_bits(got.topk_ids, want.topk_ids, rank=rank, what="ids")
            assert_same_bits(got.payloads[0], want.hidden_states, rank=rank, rows=rows)
            if want.hidden_states_scale is not None:
                assert_same_bits(got.payloads[1], want.hidden_states_scale, rank=rank, rows=rows)
            assert_same_bits(combined, sums[rank], rank=rank, what="combined")
    assert group.guards_are_whole()


@pytest.mark.parametrize("size", [1, 2, 5, 16, 33, 65, 256])
def test_rounds_are_exact_with_any_number_of_ranks(size: int) -> None:
    params = MoEEpCommParams(2 * size + 1, min(8, size), 3, 20)
    group = Group(params, size)
    rounds = [
        random_round(params, [(r + s) % 4 for r in range(size)], s)
        for s in range(1 if size > 100 else 3)
    ]
    play_and_check(group, rounds)


def test_many_rounds_on_one_workspace_are_exact() -> None:
    params = MoEEpCommParams(9, 3, 5, 70, torch.float32)
    group = Group(params, 4)
    rounds = [
        random_round(params, [(r * s) % 6 for r in range(4)], s, tokens_per_rank=5)
        for s in range(60)
    ]
    play_and_check(group, rounds)


@pytest.mark.parametrize("size", [70])
def test_masks_of_more_than_one_word_hold(size: int) -> None:
    params = MoEEpCommParams(size, 8, 2, 12)
    active = [rank for rank in range(size) if rank % 7 != 3]
    group = Group(params, size)
    one = random_round(params, [rank % 3 for rank in range(size)], seed=1)
    masked = Round(
        hidden_states=one.hidden_states,
        topk_ids=one.topk_ids,
        topk_weights=one.topk_weights,
        active_ranks=active,
    )
    play_and_check(group, [masked, masked])
    for rank in set(range(size)) - set(active):  # nobody touched their memory
        start = group.geometry.payload_offset(2, [24], 0)
        assert (group.workspace[rank, start:] == GUARD).all()


def test_up_to_four_payloads_of_any_dtypes_travel_together() -> None:
    params = MoEEpCommParams(6, 2, 5, 8)
    group = Group(params, 3, extra_bytes=100)
    g = torch.Generator().manual_seed(1)
    counts = (5, 0, 3)
    one = random_round(params, counts, seed=2)
    kinds = [(8, torch.bfloat16), (3, torch.float32), (1, torch.uint8), (9, torch.uint8)]
    payloads = [[random_rows(n, columns, dtype, g) for n in counts] for columns, dtype in kinds]

    def body(rank: int) -> list[Tensor]:
        got = kernels.dispatch(
            group.workspace,
            group.geometry,
            rank,
            one.topk_ids[rank],
            [payload[rank] for payload in payloads],
            timeout_sec=SECONDS,
        )
        assert got.topk_weights is None
        copies = [rows.clone() for rows in got.payloads]
        partial = torch.zeros(15, 8, dtype=torch.bfloat16)
        kernels.combine(
            group.workspace, group.geometry, rank, partial, counts[rank], timeout_sec=SECONDS
        )
        return copies

    by_rank = group.run(body)
    for index, payload in enumerate(payloads):
        wanted = reference_dispatch(params, 3, payload, one.topk_ids)
        for rank in range(3):
            filled = torch.arange(5) < wanted[rank].recv_token_counts[:, None]
            assert_same_bits(
                by_rank[rank][index],
                wanted[rank].hidden_states,
                rank=rank,
                what=f"payload {index}",
                rows=filled.flatten(),
            )
    assert group.guards_are_whole()


@pytest.mark.parametrize("layout", ScaleLayout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("quant_format", BLOCK_FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("hidden_size", [16, 72, 256])
@pytest.mark.parametrize(
    "precision", [{}, {"use_low_precision_combine": True}], ids=["full", "low"]
)
def test_combine_may_quantise_its_sums(
    quant_format: QuantFormat, layout: ScaleLayout, hidden_size: int, precision: dict[str, bool]
) -> None:
    params = MoEEpCommParams(6, 3, 9, hidden_size)
    group = Group(params, 3)
    one = random_round(params, (9, 0, 4), seed=5)
    scalar_scale = 3.5 if quant_format is QuantFormat.NVFP4 else 1.0

    def body(rank: int) -> tuple[Tensor, Tensor]:
        kernels.dispatch(
            group.workspace,
            group.geometry,
            rank,
            one.topk_ids[rank],
            [one.hidden_states[rank]],
            timeout_sec=SECONDS,
        )
        pair = kernels.combine(
            group.workspace,
            group.geometry,
            rank,
            partial[rank],
            len(one.topk_ids[rank]),
            output_dtype=quant_format,
            output_scalar_scale=scalar_scale,
            sf_layout=layout,
            timeout_sec=SECONDS,
            **precision,
        )
        assert isinstance(pair, tuple)
        return pair

    wanted = oracle(params, one)
    partial = [evaluate_experts(params, 3, rank, wanted[rank]) for rank in range(3)]
    sums = reference_combine(
        params,
        3,
        one.topk_ids,
        partial,
        tokens_per_rank=9,
        output_dtype=torch.float32,
        **precision,
    )
    for rank, (values, scales) in enumerate(group.run(body)):
        want_values, want_scales = quantize_rows(
            sums[rank], quant_format, scalar_scale=scalar_scale, layout=layout
        )
        assert_same_bits(values, want_values.view(torch.uint8), rank=rank, what="values")
        assert_same_bits(scales, want_scales.view(torch.uint8), rank=rank, what="scales")
    assert group.guards_are_whole()


def test_offsets_past_two_to_the_thirty_one_are_right() -> None:
    """Four-gigabyte regions, of which a few pages are touched."""
    row_bytes, capacity = 2**20, 2100
    geometry = kernels.Geometry(
        ep_size=2,
        num_experts=2,
        top_k=2,
        max_tokens_per_rank=capacity,
        dispatch_bytes_per_token=row_bytes,
        combine_bytes_per_token=row_bytes,
    )
    segment = kernels.workspace_size_per_rank(geometry)
    assert geometry.payload_offset(capacity, [row_bytes], 0) + 2**31 < segment // 2
    stride = (segment + 4095) // 4096 * 4096
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, 2 * stride, flags=flags)
    workspace = torch.frombuffer(memory, dtype=torch.uint8).view(2, stride)
    barrier = threading.Barrier(2)
    hidden_size = row_bytes // 4

    def body(rank: int) -> tuple[float, float, float]:
        kernels.initialize(workspace, geometry, rank)
        barrier.wait(SECONDS)
        rows = rows_of([rank + 1], hidden_size, torch.float32)
        ids = torch.tensor([[0, 1]], dtype=torch.int32)
        got = kernels.dispatch(workspace, geometry, rank, ids, [rows], timeout_sec=SECONDS)
        received = got.payloads[0]
        first, second = (float(received[source * capacity, -1]) for source in range(2))
        partial = kernels.combine_input_buffer(
            workspace, geometry, rank, capacity, hidden_size, torch.float32
        )
        for source in range(2):
            partial[source * capacity] = received[source * capacity] * (rank + 10)
        combined = kernels.combine(workspace, geometry, rank, partial, 1, timeout_sec=SECONDS)
        assert isinstance(combined, Tensor)
        assert (combined == combined[0, 0]).all()
        return first, second, float(combined[0, 0])

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(body, range(2), timeout=3 * SECONDS))
    assert results == [(1, 2, 21), (1, 2, 42)]


def small_group() -> tuple[Group, Round]:
    params = MoEEpCommParams(4, 2, 3, 8)
    return Group(params, 1), random_round(params, (2,), seed=1)


def call_dispatch(group: Group, one: Round, workspace: Tensor, **more: Any) -> None:
    kernels.dispatch(workspace, group.geometry, 0, one.topk_ids[0], [one.hidden_states[0]], **more)


def test_a_workspace_that_was_not_initialised_is_refused() -> None:
    group, one = small_group()
    with pytest.raises(MoEEpStateError, match="initiali"):
        call_dispatch(group, one, group.workspace)


def test_a_clone_of_a_workspace_is_refused() -> None:
    """What torch.compile hands over where it cannot keep the original; peers never see it."""
    params = MoEEpCommParams(4, 2, 3, 8)
    group, one = Group(params, 2), random_round(params, (2, 0), seed=1)
    kernels.initialize(group.workspace, group.geometry, 0)
    with pytest.raises(MoEEpStateError, match=r"clone|copy"):
        call_dispatch(group, one, group.workspace.clone(), timeout_sec=1)


def leave_in(group: Group, one: Round, state: str) -> None:
    """Bring a workspace of two ranks into a state from which no round goes on."""

    def body(rank: int) -> None:
        arguments = (one.topk_ids[rank], [one.hidden_states[rank]])
        if state == "in a round":
            kernels.dispatch(group.workspace, group.geometry, rank, *arguments, timeout_sec=SECONDS)
        elif state == "after a time-out" and rank == 0:
            for error in (MoEEpTimeoutError, MoEEpStateError):
                with pytest.raises(error, match=r"timed out earlier|waited 1 s"):
                    kernels.dispatch(group.workspace, group.geometry, 0, *arguments, timeout_sec=1)

    group.run(body)


@pytest.mark.parametrize("state", ["new", "in a round", "after a time-out"])
def test_a_workspace_can_be_initialised_again(state: str) -> None:
    params = MoEEpCommParams(5, 2, 3, 20)
    group = Group(params, 2)
    rounds = [random_round(params, (3, 2), seed) for seed in range(3)]
    play_and_check(group, rounds)
    leave_in(group, rounds[0], state)
    play_and_check(group, rounds)


def test_a_workspace_can_be_initialised_for_another_geometry() -> None:
    wide, narrow = MoEEpCommParams(5, 2, 7, 40), MoEEpCommParams(9, 3, 4, 24)
    first = Group(wide, 2)
    second = Group(narrow, 2)
    assert second.row_bytes < first.row_bytes
    second.workspace = first.workspace
    one = random_round(wide, (7, 2), seed=1)
    play_and_check(first, [one])
    play_and_check(second, [random_round(narrow, (3, 4), seed=2)])
    with pytest.raises(MoEEpStateError, match="initialised for another geometry"):
        call_dispatch(first, one, first.workspace)
    play_and_check(first, [one])


def test_a_workspace_can_be_forgotten_twice_and_used_again() -> None:
    params = MoEEpCommParams(5, 2, 3, 20)
    group = Group(params, 2)
    rounds = [random_round(params, (3, 2), seed) for seed in range(2)]
    for _ in range(2):
        for rank in (0, 1, 0, 1):  # also before it was ever initialised
            kernels.forget(group.workspace, group.geometry, rank)
        play_and_check(group, rounds)


def test_a_workspace_that_is_too_small_is_refused() -> None:
    group, _ = small_group()
    with pytest.raises(MoEEpConfigError, match=str(group.row_bytes)):
        kernels.initialize(group.workspace[:, :-1], group.geometry, 0)


def test_calls_out_of_order_are_refused() -> None:
    group, one = small_group()
    kernels.initialize(group.workspace, group.geometry, 0)
    partial = torch.zeros(3, 8, dtype=torch.bfloat16)
    with pytest.raises(MoEEpStateError, match="combine"):
        kernels.combine(group.workspace, group.geometry, 0, partial, 2)
    call_dispatch(group, one, group.workspace)
    with pytest.raises(MoEEpStateError, match="dispatch"):
        call_dispatch(group, one, group.workspace)
    with pytest.raises(MoEEpConfigError, match="num_tokens"):
        kernels.combine(group.workspace, group.geometry, 0, partial, 3)
    kernels.combine(group.workspace, group.geometry, 0, partial, 2)


def test_rows_wider_than_the_geometry_are_refused() -> None:
    group, one = small_group()
    kernels.initialize(group.workspace, group.geometry, 0)
    wide = torch.zeros(2, 9, dtype=torch.bfloat16)
    with pytest.raises(MoEEpConfigError, match="16"):
        kernels.dispatch(group.workspace, group.geometry, 0, one.topk_ids[0], [wide])
    call_dispatch(group, one, group.workspace)


def test_low_precision_rows_must_fit_the_geometry_and_are_none_of_the_buffer() -> None:
    group, one = small_group()
    kernels.initialize(group.workspace, group.geometry, 0)
    call_dispatch(group, one, group.workspace)
    where, precision = (group.workspace, group.geometry, 0), {"use_low_precision_combine": True}
    buffer = kernels.combine_input_buffer(*where, 3, 8, torch.bfloat16)
    with pytest.raises(MoEEpConfigError, match="quantised on their way"):
        kernels.combine(*where, buffer, 2, **precision)
    with pytest.raises(MoEEpConfigError, match=r"13 elements of 1 byte .*per_token=16"):
        kernels.combine(*where, torch.zeros(3, 13, dtype=torch.bfloat16), 2, **precision)
    fits = torch.full((3, 12), 448.0, dtype=torch.bfloat16)  # 12 bytes and a scale
    combined = kernels.combine(*where, fits, 2, **precision)
    assert isinstance(combined, Tensor)
    assert (combined == 448).all()


def test_a_missing_rank_is_named() -> None:
    params = MoEEpCommParams(4, 2, 3, 8)
    group = Group(params, 3)
    one = random_round(params, (1, 1, 1), seed=1)

    def body(rank: int) -> str | None:
        if rank == 2:
            return None
        with pytest.raises(MoEEpTimeoutError) as raised:
            kernels.dispatch(
                group.workspace,
                group.geometry,
                rank,
                one.topk_ids[rank],
                [one.hidden_states[rank]],
                timeout_sec=3,
            )
        return str(raised.value)

    first, second, _ = group.run(body)
    assert "rank 0" in first
    assert "rank 1" in second
    assert "rank 2" in first
    assert "rank 2" in second


def test_what_dispatch_brings_stays_in_the_workspace() -> None:
    group, one = small_group()
    kernels.initialize(group.workspace, group.geometry, 0)
    weights = torch.full((2, 2), 0.5)
    got = kernels.dispatch(
        group.workspace, group.geometry, 0, one.topk_ids[0], [one.hidden_states[0]], weights
    )
    assert got.topk_weights is not None
    begin = group.workspace.data_ptr()
    for view in (got.topk_ids, got.topk_weights, got.recv_token_counts, *got.payloads):
        assert begin <= view.data_ptr() < begin + group.row_bytes
    assert_same_bits(got.topk_ids[:2], one.topk_ids[0].int())
    assert (got.topk_ids[2] == -1).all()
    assert_same_bits(got.topk_weights[:2], weights)
    kernels.forget(group.workspace, group.geometry, 0)


def test_the_op_with_new_outputs_gives_what_the_one_in_place_leaves() -> None:
    group, one = small_group()
    kernels.initialize(group.workspace, group.geometry, 0)
    partial = torch.zeros(3, 8, dtype=torch.bfloat16)
    ids, rows, weights = one.topk_ids[0], one.hidden_states[0], torch.full((2, 2), 0.5)
    kept = copies_of(kernels.dispatch(group.workspace, group.geometry, 0, ids, [rows], weights))
    kernels.combine(group.workspace, group.geometry, 0, partial, 2)
    where = (group.geometry.fields(), 0)
    new_ids, new_weights, new_counts, no_stats = kernels.KERNELS.ops.dispatch(
        group.workspace, ids, weights, [rows], None, None, *where, -1, 3, SECONDS
    )
    assert_same_bits(new_ids, kept.topk_ids)
    assert kept.topk_weights is not None
    assert_same_bits(new_weights, kept.topk_weights)
    assert_same_bits(new_counts, kept.recv_token_counts)
    assert no_stats.shape == (0, 0)


def test_sanitising_gives_rows_without_a_token_the_invalid_id() -> None:
    ids = torch.arange(24, dtype=torch.int32).view(3, 4, 2)
    kernels.sanitize_expert_ids(ids, torch.tensor([4, 0, 1], dtype=torch.int32), -9)
    assert ids[0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ids[1].tolist() == [[-9, -9]] * 4
    assert ids[2].tolist() == [[16, 17], [-9, -9], [-9, -9], [-9, -9]]


def test_a_part_of_a_workspace_row_is_a_view_of_any_dtype() -> None:
    row = torch.zeros(256, dtype=torch.uint8)
    view = kernels.wrap_workspace(row, (2, 3), 16, 16 + 2 * 3 * 5 * 4, torch.float32)
    assert view.shape == (2, 3, 5)
    view.fill_(1.0)
    assert row[:16].eq(0).all()
    assert row[16:136].view(torch.float32).eq(1).all()
    assert row[136:].eq(0).all()
    with pytest.raises(MoEEpConfigError, match="256"):
        kernels.wrap_workspace(row, (2,), 0, 257, torch.uint8)
    with pytest.raises(MoEEpConfigError, match="evenly"):
        kernels.wrap_workspace(row, (3,), 0, 16, torch.uint8)
