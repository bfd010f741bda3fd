"""Do tensors that lie in memory in any way, or are made where they are not, give what dense ones
give?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import MoEEpCommParams, QuantFormat
from moe_ep.reference import evaluate_experts
from tests.backends import Backend, every_backend, on_the_cpu
from tests.bits import assert_same_bits
from tests.conftest import RunOnRanks
from tests.gpu_cases import few_on_gpus
from tests.ranks import RankContext
from tests.rounds import Played, Round, check_all, copy_of, create, random_round

pytestmark = pytest.mark.multirank


def with_every_second_column(dense: Tensor) -> Tensor:
    wide = dense.new_zeros(dense.shape[0], 2 * dense.shape[1])
    wide[:, ::2] = dense
    return wide[:, ::2]


def transposed(dense: Tensor) -> Tensor:
    return dense.t().contiguous().t()


def without_the_first_row(dense: Tensor) -> Tensor:
    return torch.cat([dense.new_zeros(1, dense.shape[1]), dense])[1:]


def left_part_of_wider_rows(dense: Tensor) -> Tensor:
    wide = torch.cat([dense, dense.new_zeros(dense.shape[0], 3)], dim=1)
    return wide[:, : dense.shape[1]]


def every_second_row(dense: Tensor) -> Tensor:
    return torch.stack([dense, torch.zeros_like(dense)], dim=1).flatten(0, 1)[::2]


def one_element_off(dense: Tensor) -> Tensor:
    flat = dense.new_zeros(dense.numel() + 1)[1:]
    return flat.copy_(dense.flatten()).view(dense.shape)


LAYOUTS = [
    with_every_second_column,
    transposed,
    without_the_first_row,
    left_part_of_wider_rows,
    every_second_row,
    one_element_off,
]


def play_in_layout(
    context: RankContext,
    backend: str,
    params: MoEEpCommParams,
    one: Round,
    lay_out: Callable[[Tensor], Tensor],
    options: dict[str, Any],
) -> list[Played]:
    """Body: every tensor of the round, output= included, in a layout of the same values."""
    rank = context.rank
    stats = torch.arange(6, dtype=torch.int32).repeat_interleave(2)[::2] + rank
    with create(context, params, backend, **options) as communication:

        def mine(of_each_rank: Sequence[Tensor]) -> Tensor:
            return lay_out(of_each_rank[rank].to(communication.device))

        assert one.scales is not None
        assert one.topk_weights is not None
        result = communication.dispatch(
            mine(one.hidden_states),
            mine(one.topk_ids),
            mine(one.topk_weights),
            hidden_states_scale=mine(one.scales),
            eplb_local_stats=stats.to(communication.device) if options else None,
        )
        received = copy_of(result)
        partial = evaluate_experts(params, context.size, rank, received)
        shape = (len(one.topk_ids[rank]), params.hidden_size)
        output = lay_out(torch.ones(shape, dtype=params.token_dtype, device=communication.device))
        combined = communication.combine(lay_out(partial.to(communication.device)), output=output)
        assert combined is output
        return [replace(received, combined=output.cpu().clone())]


@every_backend
@pytest.mark.parametrize("lay_out", LAYOUTS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@few_on_gpus(id_dtype=[torch.int64])
def test_tensors_of_any_layout_give_what_dense_ones_give(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    lay_out: Callable[[Tensor], Tensor],
    id_dtype: torch.dtype,
) -> None:
    params = MoEEpCommParams(6, 3, 7, 200, dispatch_format=QuantFormat.DeepSeekFp8)
    one = random_round(params, (7, 4), seed=11, id_dtype=id_dtype)
    options = {}
    if backend.statistics:
        options = {"eplb_stats_num_experts": 6}
        one = replace(one, eplb_local_stats=[torch.arange(6).int() + rank for rank in range(2)])
    played = ranks(
        2,
        play_in_layout,
        device=device,
        backend=backend.name,
        params=params,
        one=one,
        lay_out=lay_out,
        options=options,
    )
    check_all(params, [one], played)


def play_with_one_row_for_all(
    context: RankContext, backend: str, params: MoEEpCommParams, num_tokens: int
) -> list[Played]:
    """Body: every row of every input is the same memory."""
    with create(context, params, backend) as communication:
        rows, ids, weights = (
            value.to(communication.device).expand(num_tokens, -1)
            for value in row_for_all(params, context.rank)
        )
        result = communication.dispatch(rows, ids, weights)
        received = copy_of(result)
        partial = evaluate_experts(params, context.size, context.rank, received)
        combined = communication.combine(partial.to(communication.device))
        return [replace(received, combined=combined.cpu().clone())]


def row_for_all(params: MoEEpCommParams, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    one = random_round(params, (1, 1), seed=rank, padding=0)
    assert one.topk_weights is not None
    return one.hidden_states[0], one.topk_ids[0], one.topk_weights[0]


@every_backend
def test_rows_may_share_their_memory(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    params = MoEEpCommParams(6, 3, 7, 40)
    played = ranks(
        2,
        play_with_one_row_for_all,
        device=device,
        backend=backend.name,
        params=params,
        num_tokens=6,
    )
    rows, ids, weights = zip(*[row_for_all(params, rank) for rank in range(2)], strict=True)
    one = Round(
        hidden_states=[row.repeat(6, 1) for row in rows],
        topk_ids=[row.repeat(6, 1) for row in ids],
        topk_weights=[row.repeat(6, 1) for row in weights],
    )
    check_all(params, [one], played)


def play_under_another_default_device(context: RankContext, backend: str) -> list[Tensor]:
    """Body: the sums of a round while torch makes tensors elsewhere, and of a usual one."""
    params = MoEEpCommParams(6, 3, 7, 40)
    one = random_round(params, (5, 2, 0), seed=context.rank)
    assert one.topk_weights is not None
    given = (
        one.hidden_states[context.rank],
        one.topk_ids[context.rank],
        one.topk_weights[context.rank],
    )

    def sums() -> Tensor:
        result = communication.dispatch(*given)
        return communication.combine(result.hidden_states * 2)

    with torch.device("meta"):  # as where a model is made
        communication = create(context, params, backend)
    with communication:
        with torch.device("meta"):
            elsewhere = sums()
        return [elsewhere, sums()]


@on_the_cpu
def test_tensors_are_made_where_the_round_is_whatever_the_default_device_is(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    body = {"device": device, "backend": backend.name}
    for rank, got in enumerate(ranks(3, play_under_another_default_device, **body)):
        elsewhere, usual = got
        assert_same_bits(elsewhere, usual, rank=rank)
