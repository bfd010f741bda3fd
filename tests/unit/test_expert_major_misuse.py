"""Is what the grouping of rows by expert cannot take refused, and named?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ep import MoEEpConfigError, MoEEpDispatchResult, MoEEpStateError
from moe_ep.expert_major import permute_to_experts, unpermute_from_experts
from tests.unit.test_expert_major import COUNT, FIRST, received


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"alignment": 0}, MoEEpConfigError, r"alignment must be 1\.\.2147483647, got 0"),
        ({"alignment": 2**62, "max_rows": 0}, MoEEpConfigError, "alignment must be 1.*got 4611"),
        ({"alignment": 2.0}, TypeError, "alignment must be an int, got 2.0"),
        ({"alignment": 8, "max_rows": 12}, MoEEpConfigError, "max_rows must be a multiple of"),
        ({"max_rows": -1}, MoEEpConfigError, "max_rows must be a multiple of"),
        ({"max_rows": True}, TypeError, "max_rows must be an int, got True"),
    ],
)
def test_wrong_sizes_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        permute_to_experts(received(4, 2), FIRST, COUNT, **options)


def test_the_op_of_the_host_refuses_what_it_cannot_add_up() -> None:
    ids = torch.arange(8, dtype=torch.int32).view(8, 1)
    outputs = [torch.empty(size, dtype=torch.long) for size in ((8,), (9,), (8, 1), (0,))]
    with pytest.raises(MoEEpConfigError, match=r"alignment must be 1\.\.2147483647, got 4611"):
        torch.ops.moe_ep.group_picks(ids, 0, 2**62, *outputs)


def test_wrong_rows_are_refused() -> None:
    result = received(4, 2)
    permuted = permute_to_experts(result, FIRST, COUNT)
    room = permuted.hidden_states.shape[0]
    with pytest.raises(MoEEpConfigError, match=rf"rows must be \[{room}, hidden_size\]"):
        unpermute_from_experts(torch.zeros(room + 1, 4), permuted)
    for dtype in (torch.int32, torch.float64):  # sums are in float32
        with pytest.raises(TypeError, match=rf"rows must be .*torch.float32, got {dtype}"):
            unpermute_from_experts(torch.zeros(room, 4, dtype=dtype), permuted)
    with pytest.raises(TypeError, match=r"rows must be a torch.Tensor, got list"):
        unpermute_from_experts([1.0], permuted)  # type: ignore[arg-type]
    unweighted = MoEEpDispatchResult(**{**vars(result), "topk_weights": None})
    permuted = permute_to_experts(unweighted, FIRST, COUNT)
    assert permuted.topk_weights is None
    with pytest.raises(MoEEpConfigError, match="apply_weights must be False"):
        unpermute_from_experts(torch.zeros(room, 4), permuted)


def test_rows_that_do_not_fit_the_output_are_refused() -> None:
    result = received(4, 2)
    permuted = permute_to_experts(result, FIRST, COUNT)
    room, output = permuted.hidden_states.shape[0], torch.zeros(4, 24)
    for rows in (torch.zeros(room, 23), torch.zeros(room, 24).bfloat16()):
        with pytest.raises(MoEEpConfigError, match=rf"rows must be \[{room}, 24\] torch.float32"):
            unpermute_from_experts(rows, permuted, output=output)


def test_results_of_another_kind_are_refused() -> None:
    result = received(4, 2)
    with pytest.raises(TypeError, match="result must be a MoEEpDispatchResult, got Tensor"):
        permute_to_experts(result.hidden_states, FIRST, COUNT)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="permuted must be a ExpertMajorRows, got MoEEpDispatch"):
        unpermute_from_experts(torch.zeros(4, 4), result)  # type: ignore[arg-type]


def test_second_derivatives_are_refused() -> None:
    result = received(9, 4, dtype=torch.float32)
    hidden = result.hidden_states.nan_to_num().requires_grad_()
    given = MoEEpDispatchResult(**{**vars(result), "hidden_states": hidden})
    permuted = permute_to_experts(given, FIRST, COUNT)
    back = unpermute_from_experts(permuted.hidden_states.square(), permuted)
    with pytest.raises(MoEEpStateError, match="second derivatives"):
        torch.autograd.grad(back.square().sum(), hidden, create_graph=True)
