"""Does compiled code read in the workspace what it is done with by combine, and copy the rest?

Of what the code calls, on one rank: a value that is read too late is another one there, too, since
the next dispatch writes over it. Of several ranks: tests.compile.test_op_form.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor import lowering
from torch._inductor.utils import run_and_get_code

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpDispatchResult,
    QuantFormat,
    create_communication,
    inductor_views,
)
from moe_ep.dispatch_result import copy_of
from tests.backends import one_sided_names
from tests.compile.test_op_form import CAPACITY, EXPERTS, HIDDEN, TOP_K, elementwise, inputs

PARAMS = MoEEpCommParams(EXPERTS, TOP_K, CAPACITY, HIDDEN, dtype=torch.float32)
PREFIX = {"cake": "cake", "nvlink_one_sided": "one_sided"}
Keep = Callable[[MoEEpDispatchResult], MoEEpDispatchResult]
Experts = Callable[[MoEEpDispatchResult], "tuple[Tensor, Callable[[Tensor], Tensor]]"]
"""What goes into combine, and what becomes of its sums."""


@pytest.fixture(autouse=True)
def no_code_of_before() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        yield


def calls(code: str, prefix: str) -> dict[str, int]:
    """Return how often compiled code calls the ops that a round can do without, and those that
    it must have."""
    names = ("dispatch", "dispatch_in_place", "received_rows", "combine")
    return {name: code.count(f"moe_ep.{prefix}_{name}.default(") for name in names}


def compiled_code(model: Callable[..., Tensor], *arguments: Tensor) -> tuple[Tensor, str]:
    got, codes = run_and_get_code(torch.compile(model, fullgraph=True), *arguments)
    assert len(codes) == 1
    return got, codes[0]


@one_sided_names
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_layer_is_two_calls_without_copies(backend: str, layers: int) -> None:
    bootstrap = BootstrapConfig(1, 0, device="cpu")
    comms = [create_communication(bootstrap, PARAMS, backend) for _ in range(layers)]

    def model(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        for comm in comms:
            result = comm.dispatch(x, ids, weights)
            assert result.topk_weights is not None
            used = (result.topk_weights > 0).any(1, keepdim=True)
            rows = torch.where(used, elementwise(comm, result), 0)
            x = (x + comm.combine(rows)) % 64
        return x

    given = inputs(0, 5)
    want = model(*given)
    got, code = compiled_code(model, *given)
    assert torch.equal(got, want)
    wanted = {"dispatch": 0, "dispatch_in_place": layers, "received_rows": 0, "combine": layers}
    assert calls(code, PREFIX[backend]) == wanted
    assert "clone" not in code.split("def call")[1].split("def get_args")[0]
    for comm in comms:
        comm.destroy()


def result_of(
    comm: MoEEpCommunication, experts: Experts, keep: Keep
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return two rounds, of which the second writes over what the first has received."""

    def model(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        first = keep(comm.dispatch(x, ids, weights))
        rows, late = experts(first)
        sums = comm.combine(rows)
        again = comm.combine(comm.dispatch((sums + 1) % 64, ids, weights).hidden_states * 3)
        return torch.cat([late(sums).flatten().float(), sums.flatten(), again.flatten()])

    return model


def unused(sums: Tensor) -> Tensor:
    return sums


def rows_mutated(got: MoEEpDispatchResult) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    rows = got.hidden_states.mul_(2)
    rows[:, 3] = 7
    return rows + 1, unused


def rows_mutated_by_index(got: MoEEpDispatchResult) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    where = torch.tensor([1, 3])
    rows = got.hidden_states.index_put_((where,), got.hidden_states[:2] * 5, accumulate=True)
    return rows * 2, unused


def computed_early_used_late(
    got: MoEEpDispatchResult,
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    twice = got.hidden_states * 2
    return twice + 1, lambda sums: twice - sums


# What the code of both rounds calls, beside the combines. The second round's rows are never copied.
IN_PLACE = {"dispatch": 0, "dispatch_in_place": 2, "received_rows": 0}
ROWS_COPIED = {"dispatch": 0, "dispatch_in_place": 2, "received_rows": 1}
ROUTING_COPIED = {"dispatch": 1, "dispatch_in_place": 1, "received_rows": 0}
CASES: dict[str, tuple[Experts, dict[str, int]]] = {
    "identity": (lambda got: (got.hidden_states, unused), IN_PLACE),
    "a view of the rows": (lambda got: (got.hidden_states.flip(0)[:].flip(0), unused), IN_PLACE),
    "a product": (lambda got: (got.hidden_states @ torch.eye(HIDDEN), unused), IN_PLACE),
    "routing": (
        lambda got: (got.hidden_states * (got.topk_ids.sum(1, keepdim=True) + 1), unused),
        IN_PLACE,
    ),
    "counts": (lambda got: (got.hidden_states * got.recv_token_counts.sum(), unused), IN_PLACE),
    "rows used late": (
        lambda got: (got.hidden_states * 2, lambda sums: sums + got.hidden_states),
        ROWS_COPIED,
    ),
    "rows returned": (
        lambda got: (got.hidden_states * 2, lambda _: got.hidden_states),
        ROWS_COPIED,
    ),
    "an alias kept": (
        lambda got: (got.hidden_states * 2, lambda _: got.hidden_states.t()[2:]),
        ROWS_COPIED,
    ),
    "another dtype kept": (
        lambda got: (got.hidden_states * 2, lambda _: got.hidden_states.view(torch.int32) >> 8),
        ROWS_COPIED,
    ),
    "a cast that casts nothing": (
        lambda got: (got.hidden_states * 2, lambda _: got.hidden_states.clone().float()),
        ROWS_COPIED,
    ),
    "a sum used late": (
        lambda got: (got.hidden_states * 2, lambda _: got.hidden_states.sum()),
        ROWS_COPIED,
    ),
    "computed early, used late": (computed_early_used_late, ROWS_COPIED),
    "identity used late": (
        lambda got: (got.hidden_states, lambda sums: got.hidden_states - sums),
        ROWS_COPIED,
    ),
    "weights used late": (
        lambda got: (got.hidden_states * 2, lambda _: torch.stack([got.topk_ids.float()])),
        ROUTING_COPIED,
    ),
    "rows mutated": (rows_mutated, IN_PLACE),
    "rows mutated by index": (rows_mutated_by_index, ROWS_COPIED),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_used_after_combine_is_copied(case: str) -> None:
    """All rows are used: what rows without a token hold is nobody's."""
    experts, wanted = CASES[case]
    with create_communication(BootstrapConfig(1, 0, device="cpu"), PARAMS, "cake") as comm:
        given = inputs(0, CAPACITY)
        want = result_of(comm, experts, copy_of)(*given)
        got, code = compiled_code(result_of(comm, experts, lambda result: result), *given)
        assert torch.equal(got, want)
        assert calls(code, "cake") == {**wanted, "combine": 2}


def test_what_a_graph_has_no_views_of_is_not_written_to() -> None:
    """Inductor writes over what it has made and needs no more, but views are none of it."""
    with create_communication(BootstrapConfig(1, 0, device="cpu"), PARAMS, "cake") as comm:
        x, ids, weights = inputs(0, CAPACITY)
        rows = comm.dispatch(x, ids, weights).hidden_states  # where all rounds leave them
        comm.combine(rows)

        def model(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return comm.combine(comm.dispatch(x, ids, weights).hidden_states * 2 + 1)

        got, code = compiled_code(model, x + 1, ids, weights)
        assert torch.equal(got, (x + 1) * 2 + 1)
        assert torch.equal(rows, x + 1)
        wanted = {"dispatch": 0, "dispatch_in_place": 1, "received_rows": 0, "combine": 1}
        assert calls(code, "cake") == wanted


def test_views_of_quantised_rows_and_scales_move_with_the_number_of_tokens() -> None:
    """Scales lie behind the rows, of which there are tokens_per_rank."""
    hidden = 512  # rows of scales are dense: 16 bytes
    params = MoEEpCommParams(
        EXPERTS,
        TOP_K,
        CAPACITY,
        hidden,
        dtype=torch.float32,
        dispatch_format=QuantFormat.DeepSeekFp8,
    )
    with create_communication(BootstrapConfig(1, 0, device="cpu"), params, "cake") as comm:

        def model(rows: Tensor, scales: Tensor, ids: Tensor, tokens_per_rank: int) -> Tensor:
            how = {"runtime_max_tokens_per_rank": tokens_per_rank, "hidden_states_scale": scales}
            got = comm.dispatch(rows.view(torch.float8_e4m3fn), ids, **how)
            assert got.hidden_states_scale is not None
            values = got.hidden_states.view(torch.uint8).float()
            return comm.combine(values * got.hidden_states_scale.sum(1, keepdim=True))

        given = []
        for tokens_per_rank in (5, 7, 3, 8):
            random = torch.Generator().manual_seed(tokens_per_rank)
            rows = torch.randint(0, 120, (tokens_per_rank, hidden), generator=random).byte()
            scales = torch.randint(1, 9, (tokens_per_rank, 4), generator=random).float()
            ids = torch.zeros(tokens_per_rank, TOP_K, dtype=torch.int64)
            given.append((rows, scales, ids, tokens_per_rank))
        compiled = torch.compile(model, fullgraph=True)
        got, codes = run_and_get_code(lambda: [compiled(*arguments) for arguments in given])
    for sums, (rows, scales, *_) in zip(got, given, strict=True):
        assert torch.equal(sums, rows.float() * scales.sum(1, keepdim=True))
    assert len(codes) == 2, "the second one takes any number of tokens"
    for code in codes:
        assert code.count("received_rows_view.default(") == 2
        assert calls(code, "cake")["received_rows"] == 0


def test_rows_that_lie_apart_are_copied() -> None:
    """Graphs take them for dense."""
    params = MoEEpCommParams(EXPERTS, TOP_K, CAPACITY, 3, dtype=torch.float32)
    with create_communication(BootstrapConfig(1, 0, device="cpu"), params, "cake") as comm:
        x, ids, weights = inputs(0, CAPACITY)
        given = (x[:, :3].contiguous(), ids, weights)
        model = result_of(comm, lambda got: (got.hidden_states * 2, unused), lambda result: result)
        want = model(*given)
        got, code = compiled_code(model, *given)
        assert torch.equal(got, want)
        wanted = {"dispatch": 0, "dispatch_in_place": 2, "received_rows": 2, "combine": 2}
        assert calls(code, "cake") == wanted


def test_an_inductor_that_lacks_what_this_needs_makes_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    importlib.import_module("torch._inductor.graph")  # it takes what is about to go by name
    for op in [op for op in lowering.lowerings if str(op).startswith("moe_ep.cake")]:
        monkeypatch.delitem(lowering.lowerings, op)
    monkeypatch.delattr(lowering, "make_fallback")
    inductor_views.teach_inductor.cache_clear()
    try:
        with create_communication(BootstrapConfig(1, 0, device="cpu"), PARAMS, "cake") as comm:
            given = inputs(0, CAPACITY)
            model = result_of(comm, lambda got: (got.hidden_states * 2, unused), lambda got: got)
            want = model(*given)
            got, code = compiled_code(model, *given)
    finally:
        inductor_views.teach_inductor.cache_clear()
    assert torch.equal(got, want)
    wanted = {"dispatch": 2, "dispatch_in_place": 0, "received_rows": 2, "combine": 2}
    assert calls(code, "cake") == wanted
