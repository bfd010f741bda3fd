"""Do the two-sided ops on a bare workspace keep the contract, whatever the FIFOs are like? Ranks as
threads over a plain tensor."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpConfigError,
    MoEEpDisagreementError,
    MoEEpInputError,
    MoEEpStateError,
    MoEEpTimeoutError,
    NVLinkTwoSidedConfig,
    QuantFormat,
    create_communication,
    estimate_workspace_bytes,
)
from moe_ep.cake import kernels as cake_kernels
from moe_ep.nvlink_two_sided import kernels
from moe_ep.reference import evaluate_experts, reference_combine, reference_dispatch
from tests.bits import assert_same_bits
from tests.rounds import Round, ids_of, random_round, rows_of

SECONDS = 60
GUARD = 0xA5


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Got:
    """What a rank got from a round: the fields, in the order hidden rows, scales, weights, ids."""

    routing: kernels.Routing
    fields: list[Tensor]
    combined: Tensor


class Group:
    """Ranks as threads of this process, over one workspace with guard bytes behind each row."""

    def __init__(
        self, params: MoEEpCommParams, size: int, *, num_slots: int = 2, slot_bytes: int = 64
    ) -> None:
        self.params, self.size = params, size
        self.geometry = kernels.FifoGeometry(
            ep_size=size,
            num_experts=params.num_experts,
            top_k=params.top_k,
            max_tokens_per_rank=params.max_tokens_per_rank,
            num_slots=num_slots,
            slot_bytes=slot_bytes,
        )
        row_bytes = kernels.workspace_size_per_rank(self.geometry)
        self.memory = torch.full((size, row_bytes + 4096), GUARD, dtype=torch.uint8)
        self.workspace = self.memory[:, :row_bytes]
        self.barrier = threading.Barrier(size)

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Return what `body(rank)` returned on each rank's thread, after initialisation."""

        def initialised(rank: int) -> Any:
            kernels.initialize(self.workspace, self.geometry, rank)
            self.barrier.wait(SECONDS)
            return body(rank)

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(initialised, range(self.size), timeout=3 * SECONDS))

    def dispatch(
        self, rank: int, one: Round, *, timeout_sec: int = SECONDS
    ) -> tuple[kernels.Routing, list[Tensor]]:
        where = (self.workspace, self.geometry, rank)
        given = (one.hidden_states, one.scales, one.topk_weights)
        fields = [rows[rank] for rows in given if rows is not None]
        ids = one.topk_ids[rank]
        widths = [row_bytes_of(field) for field in fields] + [ids.shape[1] * 4]
        routing = kernels.prepare(
            *where,
            ids,
            widths,
            has_weights=one.topk_weights is not None,
            tokens_per_rank=one.tokens_per_rank,
            invalid_expert_id=self.params.invalid_expert_id,
            timeout_sec=timeout_sec,
        )
        fields.append(routing.topk_ids)
        rows = self.size * (one.tokens_per_rank or self.params.max_tokens_per_rank)
        received = [untouched(rows, field) for field in fields]
        kernels.alltoallv(*where, fields, routing, received, timeout_sec=timeout_sec)
        return routing, received

    def combine(
        self, rank: int, partial: Tensor, routing: kernels.Routing, **options: Any
    ) -> Tensor:
        where = (self.workspace, self.geometry, rank)
        return kernels.combine(*where, partial, routing, **{"timeout_sec": SECONDS, **options})


def untouched(rows: int, field: Tensor) -> Tensor:
    """Memory for the received rows of a field, with a known content."""
    width = row_bytes_of(field)
    return torch.full((rows, width), GUARD, dtype=torch.uint8).view(field.dtype)


def row_bytes_of(field: Tensor) -> int:
    return field.shape[1] * field.element_size()


def play_and_check(
    group: Group, rounds: Sequence[Round], pause: Callable[[int, int], None] = lambda *_: None
) -> None:
    """Play the rounds on all ranks and compare every element with the oracle.

    pause: called with rank and round before each call.
    """
    params, size = group.params, group.size
    wanted_of_round = [
        reference_dispatch(
            params,
            size,
            one.hidden_states,
            one.topk_ids,
            one.topk_weights,
            hidden_states_scale=one.scales,
            tokens_per_rank=one.tokens_per_rank,
        )
        for one in rounds
    ]
    partials = [
        [evaluate_experts(params, size, rank, wanted[rank]) for rank in range(size)]
        for wanted in wanted_of_round
    ]

    def body(rank: int) -> list[Got]:
        played = []
        for index, one in enumerate(rounds):
            pause(rank, index)
            routing, fields = group.dispatch(rank, one)
            pause(rank, index)
            combined = group.combine(rank, partials[index][rank], routing)
            played.append(Got(routing, fields, combined))
        return played

    by_rank = group.run(body)
    for index, (one, wanted, partial) in enumerate(
        zip(rounds, wanted_of_round, partials, strict=True)
    ):
        sums = reference_combine(
            params, size, one.topk_ids, partial, tokens_per_rank=wanted[0].tokens_per_rank
        )
        for rank in range(size):
            check_rank(by_rank[rank][index], wanted[rank], sums[rank], rank)
    assert (group.memory[:, group.workspace.shape[1] :] == GUARD).all()


def check_rank(got: Got, want: Any, sums: Tensor, rank: int) -> None:
    assert_same_bits(got.routing.recv_counts, want.recv_token_counts, rank=rank, what="counts")
    has_token = (torch.arange(want.tokens_per_rank) < want.recv_token_counts[:, None]).flatten()
    given = (want.hidden_states, want.hidden_states_scale, want.topk_weights, want.topk_ids)
    fields = [field for field in given if field is not None]
    for index, (ours, theirs) in enumerate(zip(got.fields, fields, strict=True)):
        assert_same_bits(ours, theirs, rank=rank, what=f"field {index}", rows=has_token)
        assert (ours.view(torch.uint8)[~has_token] == GUARD).all(), "a row without a token"
    assert_same_bits(got.combined, sums, rank=rank, what="combined")


FIFOS = [(1, 1), (1, 64), (2, 7), (4, 40), (8, 4096)]
"""Slots, and bytes of one: rows of 40 bytes are wider than the first ones."""


@pytest.mark.parametrize(("num_slots", "slot_bytes"), FIFOS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_rounds_are_exact_with_any_fifos(size: int, num_slots: int, slot_bytes: int) -> None:
    params = MoEEpCommParams(2 * size + 1, min(3, size + 1), 7, 20)
    group = Group(params, size, num_slots=num_slots, slot_bytes=slot_bytes)
    play_and_check(
        group, [random_round(params, [(r + s) % 8 for r in range(size)], s) for s in range(4)]
    )


@pytest.mark.parametrize("size", [16, 33, 65, 256])
def test_rounds_are_exact_with_any_number_of_ranks(size: int) -> None:
    params = MoEEpCommParams(2 * size + 1, 8, 3, 20)
    group = Group(params, size, slot_bytes=50)
    one = random_round(params, [r % 4 for r in range(size)], seed=1)
    play_and_check(group, [one] if size > 100 else [one, one])


@pytest.mark.parametrize("dispatch_format", [None, *QuantFormat], ids=str)
def test_several_fields_of_odd_widths_travel_together(dispatch_format: QuantFormat | None) -> None:
    params = MoEEpCommParams(6, 3, 9, 131, dispatch_format=dispatch_format)
    group = Group(params, 3, num_slots=2, slot_bytes=100)
    play_and_check(
        group,
        [
            random_round(params, (9, 0, 4), seed=1, id_dtype=torch.int64),
            random_round(params, (3, 2, 5), seed=2, tokens_per_rank=5, with_weights=False),
        ],
    )


def test_a_fifo_that_wraps_in_every_round_shows_nothing_stale() -> None:
    params = MoEEpCommParams(9, 3, 5, 70, torch.float32)
    group = Group(params, 4, num_slots=2, slot_bytes=300)
    play_and_check(
        group,
        [
            random_round(params, [(r * s) % 6 for r in range(4)], s, tokens_per_rank=5)
            for s in range(60)
        ],
    )


def test_rows_wider_than_the_whole_fifo_pass_in_pieces() -> None:
    params = MoEEpCommParams(6, 4, 6, 3000)
    group = Group(params, 3, num_slots=4, slot_bytes=128)
    play_and_check(group, [random_round(params, (6, 5, 3), seed) for seed in range(3)])


@pytest.mark.parametrize("slot_bytes", [16, 256])
def test_all_ranks_may_send_all_to_one(slot_bytes: int) -> None:
    size, tokens = 6, 40
    params = MoEEpCommParams(size, 1, tokens, 33)
    group = Group(params, size, num_slots=1, slot_bytes=slot_bytes)

    def to_rank(target: int) -> Round:
        one = random_round(params, [tokens] * size, seed=target)
        ids = [torch.full((tokens, 1), target, dtype=torch.int32)] * size
        return Round(hidden_states=one.hidden_states, topk_ids=ids, topk_weights=one.topk_weights)

    play_and_check(group, [to_rank(0), to_rank(5), to_rank(3)])


def test_every_fifo_may_be_full_at_the_same_time() -> None:
    """Every rank sends every token to every rank, far more than a FIFO holds: one that waited for
    room at a peer, and did not empty its own FIFOs meanwhile, would wait for ever."""
    size, tokens = 5, 60
    params = MoEEpCommParams(size, size, tokens, 100)
    group = Group(params, size, num_slots=1, slot_bytes=210)
    one = random_round(params, [tokens] * size, seed=1)
    ids = [torch.arange(size, dtype=torch.int32).repeat(tokens, 1)] * size
    all_to_all = Round(hidden_states=one.hidden_states, topk_ids=ids, topk_weights=one.topk_weights)
    play_and_check(group, [all_to_all, all_to_all])


@pytest.mark.parametrize("slot_bytes", [24, 500])
def test_hundreds_of_rounds_with_delays_are_exact(slot_bytes: int) -> None:
    params = MoEEpCommParams(8, 3, 6, 48)
    group = Group(params, 4, num_slots=2, slot_bytes=slot_bytes)
    delays = [random.Random(rank) for rank in range(4)]

    def maybe_sleep(rank: int, _: int) -> None:
        if delays[rank].random() < 0.1:
            time.sleep(delays[rank].uniform(0, 0.003))

    rounds = [random_round(params, [(r + s) % 7 for r in range(4)], s) for s in range(300)]
    play_and_check(group, rounds, maybe_sleep)


def test_the_workspace_does_not_depend_on_the_tokens() -> None:
    sizes = set()
    for tokens, hidden_size in ((64, 128), (8192, 128), (8192, 16384)):
        params = MoEEpCommParams(8, 2, tokens, hidden_size)
        estimate = estimate_workspace_bytes(params, 1, NVLinkTwoSidedConfig(), device="cpu")
        bootstrap = BootstrapConfig(1, 0, device="cpu")
        with create_communication(bootstrap, params, "nvlink_two_sided") as made:
            assert made.workspace_bytes == estimate
        sizes.add(estimate)
    assert len(sizes) == 1


def test_received_rows_stay_when_the_round_is_over() -> None:
    params = MoEEpCommParams(4, 2, 8, 16)
    bootstrap = BootstrapConfig(1, 0, device="cpu")
    with create_communication(bootstrap, params, "nvlink_two_sided") as made:
        kept = []
        for number in (1.0, 2.0, 3.0):
            result = made.dispatch(rows_of([number] * 3, 16), ids_of([[0, 1]] * 3, 2))
            made.combine(result.hidden_states)
            kept.append(result.hidden_states)
    for number, rows in zip((1.0, 2.0, 3.0), kept, strict=True):
        assert_same_bits(rows[:3], rows_of([number] * 3, 16))


@pytest.mark.parametrize("count", [0, -1, 2**31])
def test_a_count_of_multiprocessors_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(MoEEpConfigError, match=rf"max_sm_count must be 1\.\..*got {count}"):
        NVLinkTwoSidedConfig(max_sm_count=count)


@pytest.mark.parametrize("count", [1.0, "all", True])
def test_a_count_of_multiprocessors_is_an_int(count: Any) -> None:
    with pytest.raises(TypeError, match="max_sm_count must be an int"):
        NVLinkTwoSidedConfig(max_sm_count=count)


def test_a_limit_of_multiprocessors_is_without_effect_on_the_cpu() -> None:
    params = MoEEpCommParams(4, 2, 8, 16)
    bootstrap = BootstrapConfig(1, 0, device="cpu")
    rows = rows_of([1, 2, 3], 16)
    with create_communication(bootstrap, params, "nvlink_two_sided", max_sm_count=1) as made:
        result = made.dispatch(rows, ids_of([[0, 1]] * 3, 2))
        assert_same_bits(made.combine(result.hidden_states), rows)


def test_a_workspace_on_the_cpu_has_one_channel() -> None:
    geometry = kernels.FifoGeometry(
        ep_size=1,
        num_experts=4,
        top_k=2,
        max_tokens_per_rank=5,
        num_slots=2,
        slot_bytes=64,
        num_channels=2,
    )
    workspace = torch.zeros(1, geometry.segment_bytes, dtype=torch.uint8)
    with pytest.raises(MoEEpConfigError, match="num_channels must be 1 on the CPU, got 2"):
        kernels.initialize(workspace, geometry, 0)


PARAMS = MoEEpCommParams(4, 2, 5, 16)


@pytest.mark.parametrize("silent_in", ["prepare", "alltoallv", "combine"])
def test_a_silent_peer_is_named_with_phase_and_epoch(silent_in: str) -> None:
    group = Group(PARAMS, 3, num_slots=1, slot_bytes=40)
    ids = [torch.tensor([[0, 3], [1, 2], [0, 3], [1, 2], [0, 3]])] * 3
    one = Round(hidden_states=random_round(PARAMS, (5, 5, 5), seed=1).hidden_states, topk_ids=ids)
    partial = torch.zeros(15, 16, dtype=torch.bfloat16)
    phase = "combine" if silent_in == "combine" else "dispatch"

    def fall_silent() -> None:
        if silent_in == "alltoallv":
            kernels.prepare(group.workspace, group.geometry, 2, ids[2], [32, 8])
        elif silent_in == "combine":
            group.dispatch(2, one)

    def play_last_round(rank: int) -> None:
        routing, _ = group.dispatch(rank, one, timeout_sec=3)
        group.combine(rank, partial, routing, timeout_sec=3)

    def body(rank: int) -> tuple[str, float] | None:
        routing, _ = group.dispatch(rank, one)
        group.combine(rank, partial, routing)
        if rank == 2:
            fall_silent()
            return None
        started = time.monotonic()
        with pytest.raises(MoEEpTimeoutError) as raised:
            play_last_round(rank)
        seconds = time.monotonic() - started
        with pytest.raises(MoEEpStateError, match="timed out earlier"):
            group.dispatch(rank, one)
        return str(raised.value), seconds

    for rank, waited in enumerate(group.run(body)[:2]):
        assert waited is not None
        message, seconds = waited
        seen = 2 if silent_in == "alltoallv" else 1
        assert f"rank {rank} waited 3 s in {phase} for rank 2" in message
        assert f"(epoch 2 expected, {seen} seen" in message
        assert ("it stopped among its rows" in message) == (silent_in == "alltoallv")
        assert 3 <= seconds < 20


def test_ranks_that_prepare_different_rows_all_learn_of_it_and_go_on() -> None:
    group = Group(PARAMS, 3)
    one = random_round(PARAMS, (5, 0, 2), seed=1)

    def body(rank: int) -> str:
        where = (group.workspace, group.geometry, rank)
        with pytest.raises(MoEEpDisagreementError) as raised:
            kernels.prepare(*where, one.topk_ids[rank], [32, 8 + 4 * (rank == 1)])
        routing, _ = group.dispatch(rank, one)
        group.combine(rank, torch.zeros(15, 16), routing)
        return str(raised.value)

    for message in group.run(body):
        assert "rank 0: tokens_per_rank=5" in message
        assert "row bytes 32 8" in message
        assert "row bytes 32 12" in message


def test_ranks_that_combine_different_rows_all_learn_of_it_and_go_on() -> None:
    group = Group(PARAMS, 3)
    one = random_round(PARAMS, (5, 0, 2), seed=1)

    def body(rank: int) -> str:
        routing, _ = group.dispatch(rank, one)
        with pytest.raises(MoEEpDisagreementError) as raised:
            group.combine(rank, torch.zeros(15, 16 + (rank == 1)), routing)
        routing, _ = group.dispatch(rank, one)
        group.combine(rank, torch.zeros(15, 16), routing)
        return str(raised.value)

    for rank, message in enumerate(group.run(body)):
        assert f"this rank's have {16 + (rank == 1)} elements of 4 bytes" in message


def test_the_sums_may_overwrite_the_expert_output() -> None:
    params = MoEEpCommParams(4, 4, 6, 24)
    group = Group(params, 3, num_slots=1, slot_bytes=100)
    one = random_round(params, (6, 6, 6), seed=3, padding=0)
    wanted = reference_dispatch(params, 3, one.hidden_states, one.topk_ids, one.topk_weights)
    partial = [evaluate_experts(params, 3, rank, wanted[rank]) for rank in range(3)]
    sums = reference_combine(params, 3, one.topk_ids, partial, tokens_per_rank=6)

    def body(rank: int) -> Tensor:
        routing, _ = group.dispatch(rank, one)
        rows = partial[rank].clone()
        return group.combine(rank, rows, routing, output=rows[4:10])

    for rank, combined in enumerate(group.run(body)):
        assert_same_bits(combined, sums[rank], rank=rank)


def test_ids_of_no_expert_are_raised_by_combine_when_the_sums_are_there() -> None:
    group = Group(PARAMS, 1)
    rows = rows_of([1, 2], 16)
    one = Round(hidden_states=[rows], topk_ids=[ids_of([[0, 99], [1, -1]], 2)])
    output = torch.empty(2, 16, dtype=torch.bfloat16)

    def body(rank: int) -> None:
        routing, (received, _) = group.dispatch(rank, one)
        with pytest.raises(MoEEpInputError, match="token 0, slot 1: 99"):
            group.combine(rank, received, routing, output=output)

    group.run(body)
    assert_same_bits(output, rows)


class Alone:
    """One rank between dispatch and combine, with tensors to call with."""

    def __init__(self) -> None:
        self.group = Group(PARAMS, 1)
        kernels.initialize(self.group.workspace, self.group.geometry, 0)
        self.where = (self.group.workspace, self.group.geometry, 0)
        self.ids = ids_of([[0, 3], [1, -1]], 2)
        self.rows = rows_of([1, 2], 16)
        self.received = torch.empty(5, 16, dtype=torch.bfloat16)

    def prepare(self, row_bytes: Sequence[int] = (32,), **options: Any) -> kernels.Routing:
        return kernels.prepare(*self.where, self.ids, row_bytes, **options)

    def move(self, routing: kernels.Routing, **other: Any) -> None:
        given = {"rows": [self.rows], "received": [self.received], **other}
        kernels.alltoallv(*self.where, given["rows"], routing, given["received"])

    def combine(self, routing: kernels.Routing) -> Tensor:
        return kernels.combine(*self.where, self.received, routing)


def test_calls_in_the_wrong_order_raise_and_change_nothing() -> None:
    alone = Alone()
    routing = alone.prepare()
    with pytest.raises(MoEEpStateError, match="prepare was called twice"):
        alone.prepare()
    with pytest.raises(MoEEpStateError, match="combine was called before alltoallv"):
        alone.combine(routing)
    alone.move(routing)
    with pytest.raises(MoEEpStateError, match="alltoallv must follow prepare, once"):
        alone.move(routing)
    assert_same_bits(alone.combine(routing), alone.rows)
    with pytest.raises(MoEEpStateError, match="alltoallv must follow prepare, once"):
        alone.move(routing)
    with pytest.raises(MoEEpStateError, match="combine was called before alltoallv"):
        alone.combine(routing)


def test_the_routing_of_another_round_is_refused() -> None:
    alone = Alone()
    routing = alone.prepare()
    forged = routing._replace(send_tokens=torch.tensor([1, 0, -1], dtype=torch.int32))
    with pytest.raises(MoEEpConfigError, match="send_tokens must be what prepare returned"):
        alone.move(forged)
    alone.move(routing)
    with pytest.raises(MoEEpConfigError, match="send_tokens must be what prepare returned"):
        alone.combine(forged)
    assert_same_bits(alone.combine(routing), alone.rows)


def test_fields_other_than_those_prepared_are_refused() -> None:
    alone = Alone()
    routing = alone.prepare()
    wide, few = torch.zeros(2, 17, dtype=torch.bfloat16), torch.zeros(4, 16, dtype=torch.bfloat16)
    for wrong, words in (
        ({"rows": [wide]}, "field 0 must have rows of 32 bytes"),
        ({"rows": [alone.rows] * 2, "received": [alone.received] * 2}, "each of the 1 fields"),
        ({"received": [few]}, "received.0. must be contiguous .5, columns"),
        ({"rows": [alone.rows[:1]]}, "a row for each of the 2 tokens"),
    ):
        with pytest.raises(MoEEpConfigError, match=words):
            alone.move(routing, **wrong)
    alone.move(routing)
    assert_same_bits(alone.combine(routing), alone.rows)


@pytest.mark.parametrize(
    ("row_bytes", "words"),
    [
        ([], "1 to 4 fields, got 0"),
        ([4] * 5, "1 to 4 fields, got 5"),
        ([0], "at least one byte"),
        ([-1], "got -1"),
        ([2**62], "together, got 4611686018427387904"),
    ],
)
def test_widths_that_cannot_be_are_refused(row_bytes: Sequence[int], words: str) -> None:
    with pytest.raises(MoEEpConfigError, match=words):
        Alone().prepare(row_bytes)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_slots", 3), ("num_slots", 0), ("num_slots", 2**17), ("slot_bytes", 0), ("top_k", 33)],
)
def test_fifos_that_cannot_be_are_refused(name: str, value: int) -> None:
    sizes = {"ep_size": 2, "num_experts": 40, "top_k": 2, "max_tokens_per_rank": 5}
    fifos = {"num_slots": 2, "slot_bytes": 64}
    with pytest.raises(ValueError, match=rf"{name} must be .*got {value}"):
        kernels.FifoGeometry(**{**sizes, **fifos, name: value})


def test_fifos_of_more_picks_than_experts_are_refused() -> None:
    sizes = {"ep_size": 2, "num_experts": 3, "max_tokens_per_rank": 5}
    fifos = {"num_slots": 2, "slot_bytes": 64}
    with pytest.raises(ValueError, match="top_k must not exceed num_experts=3, got 4"):
        kernels.FifoGeometry(**sizes, **fifos, top_k=4)
    assert kernels.FifoGeometry(**sizes, **fifos, top_k=3).top_k == 3


def test_a_workspace_of_another_transport_is_refused() -> None:
    alone = Alone()
    geometry = cake_kernels.Geometry(
        ep_size=1,
        num_experts=4,
        top_k=2,
        max_tokens_per_rank=5,
        dispatch_bytes_per_token=32,
        combine_bytes_per_token=32,
    )
    workspace = torch.zeros(1, 1 << 20, dtype=torch.uint8)
    cake_kernels.initialize(workspace, geometry, 0)
    with pytest.raises(MoEEpStateError, match="initialised for another geometry"):
        kernels.prepare(workspace, alone.group.geometry, 0, alone.ids, [32])
