"""Does one rank refuse what has no gradient, and keep what needs none as it is?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpConfigError,
    MoEEpInputError,
    MoEEpStateError,
    QuantFormat,
    create_communication,
)
from tests.bits import assert_same_bits

SMALL = MoEEpCommParams(6, 3, 7, 5, torch.float32)
IDS = torch.tensor([[0, 5, -1], [2, 2, 4]])
ROWS = torch.arange(10, dtype=torch.float32).view(2, 5) + 1
WEIGHTS = torch.ones(2, 3)


@pytest.fixture(params=["cake", "nvlink_one_sided", "torch_dist"])
def comm(request: pytest.FixtureRequest) -> Iterator[MoEEpCommunication]:
    bootstrap = BootstrapConfig(1, 0, device="cpu")
    with create_communication(bootstrap, SMALL, request.param) as made:
        yield made


def grad_of(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad


def needing_grad(value: Tensor) -> Tensor:
    return value.clone().requires_grad_()


def test_without_grad_mode_nothing_is_recorded_or_copied(comm: MoEEpCommunication) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            result = comm.dispatch(needing_grad(ROWS), IDS, needing_grad(WEIGHTS))
            assert comm._recorded is None
            combined = comm.combine(needing_grad(result.hidden_states))
        for tensor in (result.hidden_states, result.topk_weights, combined):
            assert tensor is not None
            assert not tensor.requires_grad
        if comm.backend_name != "torch_dist":
            received = result.hidden_states.untyped_storage().data_ptr()
            assert received == comm._workspace.untyped_storage().data_ptr()  # type: ignore[attr-defined]


def test_in_grad_mode_results_outlive_the_round_and_empty_rows_are_zero(
    comm: MoEEpCommunication,
) -> None:
    first = comm.dispatch(ROWS, IDS, WEIGHTS)
    assert not first.hidden_states.requires_grad
    assert not comm.combine(first.hidden_states).requires_grad
    second = comm.dispatch(needing_grad(-ROWS), IDS[:, [2, 1, 0]], WEIGHTS * 2)
    comm.combine(second.hidden_states)
    for result, factor, ids in ((first, 1, IDS), (second, -1, IDS[:, [2, 1, 0]])):
        assert torch.equal(result.hidden_states[:2], ROWS * factor)
        assert torch.equal(result.topk_ids[:2], ids.int())
        assert not result.hidden_states[2:].any()
        assert not result.topk_weights[2:].any()  # type: ignore[index]


def test_outputs_require_grad_where_their_inputs_do(comm: MoEEpCommunication) -> None:
    for x_needs, w_needs in ((True, False), (False, True), (True, True)):
        x, w = ROWS.clone().requires_grad_(x_needs), WEIGHTS.clone().requires_grad_(w_needs)
        result = comm.dispatch(x, IDS, w)
        assert result.hidden_states.requires_grad == x_needs
        assert result.topk_weights is not None
        assert result.topk_weights.requires_grad == w_needs
        # Also where the experts use nothing of it: backward is collective.
        combined = comm.combine(torch.zeros(7, 5))
        assert combined.requires_grad
        combined.sum().backward()
        assert x.grad is None or not x.grad.any()


def test_expert_output_by_source_and_zeros_in_rows_without_a_token(
    comm: MoEEpCommunication,
) -> None:
    comm.dispatch(ROWS, IDS)
    partial = torch.full((1, 7, 5), float("nan"))
    partial[0, :2] = ROWS
    partial.requires_grad_()
    comm.combine(partial).sum().backward()
    wanted = torch.zeros(1, 7, 5)
    wanted[0, :2] = 1
    assert partial.grad is not None
    assert_same_bits(partial.grad, wanted)


def test_wrong_ids_and_statistics_are_recorded_once() -> None:
    params = replace(SMALL, invalid_expert_id=9)
    bootstrap = BootstrapConfig(1, 0, device="cpu")
    with create_communication(bootstrap, params, "cake", eplb_stats_num_experts=2) as comm:
        x = needing_grad(ROWS)
        stats = torch.tensor([3, 4], dtype=torch.int32)
        ids = torch.tensor([[0, 9, -1], [9, -7, 9]])
        result = comm.dispatch(x, ids, eplb_local_stats=stats)
        y = comm.combine(result.hidden_states)
        y.sum().backward()
        assert result.eplb_gathered_stats is not None
        assert result.eplb_gathered_stats.tolist() == [[3, 4]]
        assert x.grad is not None
        assert x.grad[:, 0].tolist() == [1, 0]
        comm.check()


def test_a_backward_does_not_raise_for_wrong_ids_again(comm: MoEEpCommunication) -> None:
    x = needing_grad(ROWS)
    received = comm.dispatch(x, torch.tensor([[0, 6, -1], [1000, 7, 6]]))
    with pytest.raises(MoEEpInputError, match=r"token 0, slot 1: 6"):
        comm.combine(received.hidden_states)
    received.hidden_states.sum().backward()
    assert grad_of(x.grad)[:, 0].tolist() == [1, 0]
    comm.check()


def test_a_second_derivative_is_refused(comm: MoEEpCommunication) -> None:
    x = needing_grad(ROWS)
    y = x + comm.combine(comm.dispatch(x, IDS).hidden_states ** 2)
    with pytest.raises(MoEEpStateError, match="second derivatives"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
    y.sum().backward()  # what the other one left open is closed


def test_ids_that_cannot_be_saved_are_refused_before_anything_is_sent(
    comm: MoEEpCommunication,
) -> None:
    with torch.inference_mode():
        ids = IDS.clone()
    with pytest.raises(MoEEpConfigError, match="topk_ids must not be made in inference mode"):
        comm.dispatch(needing_grad(ROWS), ids)
    assert torch.equal(comm.combine(comm.dispatch(ROWS, ids).hidden_states), ROWS)


def test_a_backward_in_an_open_round_is_refused(comm: MoEEpCommunication) -> None:
    y = comm.combine(comm.dispatch(needing_grad(ROWS), IDS).hidden_states)
    received = comm.dispatch(ROWS, IDS)
    with pytest.raises(MoEEpStateError, match="backward while a round is open"):
        y.sum().backward()
    assert torch.equal(comm.combine(received.hidden_states), ROWS)


def test_ids_changed_in_place_before_backward_are_refused(comm: MoEEpCommunication) -> None:
    ids = IDS.clone()
    y = comm.combine(comm.dispatch(needing_grad(ROWS), ids).hidden_states)
    ids.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_output_is_refused_in_a_round_with_gradients(comm: MoEEpCommunication) -> None:
    result = comm.dispatch(needing_grad(ROWS), IDS)
    with pytest.raises(MoEEpConfigError, match="output must be None in a round with gradients"):
        comm.combine(result.hidden_states, output=torch.empty(2, 5))
    assert comm.get_combine_input_buffer() is None
    assert torch.equal(comm.combine(result.hidden_states), ROWS)


def test_grad_mode_must_be_the_same_in_both_calls(comm: MoEEpCommunication) -> None:
    with torch.no_grad():
        received = comm.dispatch(ROWS, IDS)
    with pytest.raises(MoEEpStateError, match="its dispatch ran without grad mode"):
        comm.combine(needing_grad(received.hidden_states))
    assert torch.equal(comm.combine(received.hidden_states), ROWS)


def test_library_memory_does_not_join_the_graph() -> None:
    with create_communication(BootstrapConfig(1, 0, device="cpu"), SMALL, "cake") as comm:
        received = comm.dispatch(ROWS, IDS)
        buffer = comm.get_combine_input_buffer()
        assert buffer is not None
        buffer.copy_(needing_grad(received.hidden_states))
        with pytest.raises(MoEEpConfigError, match="the memory of get_combine_input_buffer"):
            comm.combine(buffer)
        assert not comm._workspace.requires_grad  # type: ignore[attr-defined]
        assert torch.equal(comm.combine(received.hidden_states), ROWS)


Refused = tuple[MoEEpCommParams, dict[str, bool], Callable[[MoEEpCommunication], object]]
REFUSED: dict[str, Refused] = {
    "quantised rows, weights": (
        replace(SMALL, dispatch_format=QuantFormat.FP8PerTensor),
        {},
        lambda c: c.dispatch(ROWS.to(torch.float8_e4m3fn), IDS, needing_grad(WEIGHTS)),
    ),
    "quantised rows": (
        replace(SMALL, dispatch_format=QuantFormat.FP8PerTensor),
        {},
        lambda c: c.dispatch(needing_grad(ROWS.to(torch.float8_e4m3fn)), IDS),
    ),
    "rows of another precision": (
        replace(SMALL, dispatch_format=QuantFormat.BF16),
        {},
        lambda c: c.dispatch(needing_grad(ROWS.bfloat16()), IDS),
    ),
    "low-precision combine": (
        SMALL,
        {"use_low_precision_combine": True},
        lambda c: c.dispatch(needing_grad(ROWS), IDS),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_gradients_that_cannot_be_are_refused_before_anything_is_sent(name: str) -> None:
    params, options, call = REFUSED[name]
    with create_communication(BootstrapConfig(1, 0, device="cpu"), params, "cake", **options) as c:
        with pytest.raises(MoEEpConfigError, match=r"requires grad.*quantised rows.*no_grad"):
            call(c)
        with torch.no_grad():
            dtype = params.row_format.value_dtypes[0]
            c.combine(c.dispatch(ROWS.to(dtype), IDS).hidden_states.to(torch.float32))


def test_rows_too_narrow_for_a_gradient_of_the_weights_are_named() -> None:
    params = MoEEpCommParams(6, 3, 7, 1, torch.bfloat16)
    with create_communication(BootstrapConfig(1, 0, device="cpu"), params, "cake") as comm:
        with pytest.raises(MoEEpConfigError, match=r"topk_weights requires grad.*hidden_size=1"):
            comm.dispatch(ROWS[:, :1].bfloat16(), IDS, needing_grad(WEIGHTS))
        x = needing_grad(ROWS[:, :1].bfloat16())
        comm.combine(comm.dispatch(x, IDS, WEIGHTS).hidden_states).sum().backward()
        assert x.grad is not None
        assert x.grad.flatten().tolist() == [1, 1]


def layer(comm: MoEEpCommunication, x: Tensor, weights: Tensor) -> Tensor:
    received = comm.dispatch(x, IDS, weights)
    assert received.topk_weights is not None
    return comm.combine(received.hidden_states * received.topk_weights.sum(1, keepdim=True))


@pytest.mark.parametrize(("weights_need_grad", "rounds"), [(False, 1), (True, 2)])
def test_the_backward_of_a_layer_is_one_round_and_one_for_the_weights(
    comm: MoEEpCommunication,
    monkeypatch: pytest.MonkeyPatch,
    weights_need_grad: bool,
    rounds: int,
) -> None:
    y = layer(comm, needing_grad(ROWS), WEIGHTS.clone().requires_grad_(weights_need_grad))
    calls: list[str] = []
    for name in ("_dispatch", "_combine"):
        hook = getattr(comm, name)

        def counted(*args: Any, name: str = name, hook: Any = hook, **kwargs: Any) -> Any:
            calls.append(name)
            return hook(*args, **kwargs)

        monkeypatch.setattr(comm, name, counted)
    y.sum().backward()
    assert calls == ["_dispatch", "_combine"] * rounds


def test_a_checkpoint_around_dispatch_alone_is_refused(comm: MoEEpCommunication) -> None:
    x = needing_grad(ROWS)

    def dispatched_and_squared(x: Tensor) -> Tensor:
        return comm.dispatch(x, IDS).hidden_states ** 2

    y = comm.combine(checkpoint(dispatched_and_squared, x, use_reentrant=False))
    with pytest.raises(MoEEpStateError, match="backward while a round is open"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["x", "w"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_gradients_are_those_of_eager_mode(
    comm: MoEEpCommunication, name: str, fullgraph: bool
) -> None:
    def gradient(run: Callable[[MoEEpCommunication, Tensor, Tensor], Tensor]) -> Tensor:
        x, w = ROWS.clone().requires_grad_(name == "x"), WEIGHTS.clone().requires_grad_(name == "w")
        run(comm, x, w).square().sum().backward()
        return grad_of(x.grad if name == "x" else w.grad)

    torch._dynamo.reset()
    got = gradient(torch.compile(layer, fullgraph=fullgraph, backend="aot_eager"))
    assert torch.equal(got, gradient(layer))


def test_a_round_with_gradients_is_compiled_as_a_whole_or_not_at_all(
    comm: MoEEpCommunication,
) -> None:
    compiled = functools.partial(torch.compile, backend="aot_eager")
    torch._dynamo.reset()
    received = compiled(lambda x: comm.dispatch(x, IDS))(needing_grad(ROWS))
    with pytest.raises(MoEEpStateError, match=r"or in a compiled graph.*compile both or neither"):
        comm.combine(received.hidden_states)
    comm.combine(received.hidden_states.detach())

    received = comm.dispatch(needing_grad(ROWS), IDS)
    # How dynamo words an exception that it traced differs between torch versions.
    with pytest.raises(Exception, match="its dispatch was not: compile both or neither"):
        compiled(comm.combine, fullgraph=True)(received.hidden_states)
    assert torch.equal(comm.combine(received.hidden_states), ROWS)


def test_an_eager_layer_is_right_in_a_compiled_model(comm: MoEEpCommunication) -> None:
    eager_layer = torch.compiler.disable(layer)  # type: ignore[no-untyped-call]

    def model(comm: MoEEpCommunication, x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = eager_layer(comm, x * 2, w * 3)
        return y * 4

    def gradient(run: Callable[[MoEEpCommunication, Tensor, Tensor], Tensor]) -> Tensor:
        x = ROWS.clone().requires_grad_()
        run(comm, x, WEIGHTS).square().sum().backward()
        return grad_of(x.grad)

    torch._dynamo.reset()
    assert torch.equal(gradient(torch.compile(model, backend="aot_eager")), gradient(model))
