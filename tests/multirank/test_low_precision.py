"""Does use_low_precision_combine give the sums of the quantised rows, wherever they come from?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import MoEEpCommParams, MoEEpConfigError, QuantFormat
from moe_ep.one_sided.communication import OneSidedAlltoAll
from moe_ep.quantization import BLOCK_FORMATS, ScaleLayout, quantize_rows
from moe_ep.reference import evaluate_experts, reference_combine, reference_dispatch
from tests.backends import Backend, named, on_each
from tests.bits import assert_same_bits
from tests.conftest import RunOnRanks
from tests.gpu_cases import few_on_gpus
from tests.problems import Problem, expect, problem_of
from tests.ranks import RankContext
from tests.ranks.devices import ONE_GPU
from tests.rounds import (
    Played,
    Round,
    check_all,
    copy_of,
    create,
    play,
    play_round,
    random_round,
)

pytestmark = pytest.mark.multirank
LOW = {"use_low_precision_combine": True}
everywhere = on_each(having="low_precision")
# Whole blocks and vectors; rows that do not start on 16 bytes; a short last block.
ROWS = [
    (torch.bfloat16, 1024),
    (torch.bfloat16, 1001),
    (torch.float16, 1001),
    (torch.float32, 200),
]


@everywhere
@pytest.mark.parametrize(("dtype", "hidden_size"), ROWS)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@few_on_gpus(size=[2, 8])
def test_combine_sums_the_quantised_rows(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    dtype: torch.dtype,
    hidden_size: int,
    size: int,
) -> None:
    params = MoEEpCommParams(24, 8, 170, hidden_size, dtype)
    rounds = [
        random_round(params, [most - rank % 2 for rank in range(size)], most, tokens_per_rank=most)
        for most in (1, 5, 170, 4)
    ]
    one_gpu = device == ONE_GPU
    in_place = backend.takes_rows_in_place(dtype, one_gpu=one_gpu, low_precision=True)
    for combine_input in ("tensor", *(["buffer"] if in_place else [])):
        played = ranks(
            size,
            play,
            device=device,
            backend=backend.name,
            params=params,
            rounds=rounds,
            options=LOW,
            give_output=True,
            combine_input=combine_input,
        )
        check_all(params, rounds, played, low_precision=True)


def take_turns(
    context: RankContext, backend: str, params: MoEEpCommParams, rounds: list[Round]
) -> list[Played]:
    """Body: rounds of a layer in full and of one in low precision, in turn."""
    with (
        create(context, params, backend) as full,
        create(context, params, backend, **LOW) as low,
    ):
        layers = (full, low)
        return [play_round(layers[index % 2], one) for index, one in enumerate(rounds)]


@everywhere
def test_layers_in_full_and_in_low_precision_take_turns(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    params = MoEEpCommParams(24, 8, 170, 1001, torch.bfloat16)
    counts = [(1, 1), (1, 1), (170, 3), (2, 170), (4, 0), (0, 4), (5, 5), (170, 169)]
    rounds = [
        random_round(params, of_ranks, seed, tokens_per_rank=max(of_ranks))
        for seed, of_ranks in enumerate(counts)
    ]
    played = ranks(2, take_turns, device=device, backend=backend.name, params=params, rounds=rounds)
    for index, low_precision in enumerate((False, True)):
        mine = [of_rank[index::2] for of_rank in played]
        check_all(params, rounds[index::2], mine, low_precision=low_precision)


def quantised_sums(
    context: RankContext,
    backend: str,
    params: MoEEpCommParams,
    one: Round,
    partial: list[Tensor],
    options: dict[str, bool],
    how: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Body: a round whose sums are quantised; the experts' rows are parts of wider ones."""
    rank = context.rank
    with create(context, params, backend, **options) as communication:
        assert isinstance(communication, OneSidedAlltoAll)
        where = (communication._workspace, communication._layout, rank)
        kernels = named(backend).kernels
        ids, rows = (
            given[rank].to(communication.device) for given in (one.topk_ids, one.hidden_states)
        )
        copy_of(communication.dispatch(rows, ids))
        wide = torch.full((len(partial[rank]), params.hidden_size + 3), float("nan"))
        wide[:, : params.hidden_size] = partial[rank]
        pair = kernels.combine(
            *where,
            wide.to(communication.device, params.token_dtype)[:, : params.hidden_size],
            len(ids),
            **how,
            **options,
        )
        kernels.check(*where)
        assert isinstance(pair, tuple)
        return pair[0].cpu(), pair[1].cpu()


@everywhere
@pytest.mark.parametrize("options", [{}, LOW], ids=["full", "low"])
@pytest.mark.parametrize("quant_format", BLOCK_FORMATS)
@pytest.mark.parametrize(
    ("dtype", "hidden_size", "tokens"), [(torch.bfloat16, 1024, 9), (torch.float32, 583, 150)]
)
def test_sums_may_be_quantised_whatever_the_precision_of_the_rows(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    options: dict[str, bool],
    quant_format: QuantFormat,
    dtype: torch.dtype,
    hidden_size: int,
    tokens: int,
) -> None:
    params = MoEEpCommParams(6, 3, tokens, hidden_size, dtype)
    one = random_round(params, (tokens, 0, tokens - 2), seed=5, with_weights=False)
    sent = reference_dispatch(params, 3, one.hidden_states, one.topk_ids)
    partial = [evaluate_experts(params, 3, rank, sent[rank]) for rank in range(3)]
    scalar_scale = 3.5 if quant_format is QuantFormat.NVFP4 else 1.0
    layout = ScaleLayout.SWIZZLE_128x4
    how = {
        "output_dtype": quant_format,
        "output_scalar_scale": scalar_scale,
        "sf_layout": layout,
    }
    got = ranks(
        3,
        quantised_sums,
        device=device,
        backend=backend.name,
        params=params,
        one=one,
        partial=partial,
        options=options,
        how=how,
    )
    sums = reference_combine(
        params,
        3,
        one.topk_ids,
        partial,
        tokens_per_rank=tokens,
        output_dtype=torch.float32,
        **options,
    )
    for rank, (values, scales) in enumerate(got):
        wanted = quantize_rows(sums[rank], quant_format, scalar_scale=scalar_scale, layout=layout)
        assert_same_bits(values, wanted[0].view(torch.uint8), rank=rank, what="values")
        assert_same_bits(scales, wanted[1].view(torch.uint8), rank=rank, what="scales")


PARAMS = MoEEpCommParams(4, 2, 8, 16)


def sizes_and_buffer(context: RankContext, backend: str) -> tuple[int, int, bool]:
    """Body: workspace_bytes, their estimate, and whether there is a combine input buffer."""
    with create(context, PARAMS, backend, **LOW) as communication:
        estimated = communication.estimate_workspace_bytes(
            PARAMS,
            context.size,
            communication.config,
            device=communication.device,
        )
        one = random_round(PARAMS, (2, 2), seed=1)
        communication.dispatch(
            one.hidden_states[context.rank].to(communication.device),
            one.topk_ids[context.rank].to(communication.device),
        )
        has_buffer = communication.get_combine_input_buffer(torch.bfloat16) is not None
        return communication.workspace_bytes, estimated, has_buffer


@everywhere
def test_the_workspace_is_what_was_estimated_and_takes_rows_where_they_are_pulled(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for held, estimated, has_buffer in ranks(
        2, sizes_and_buffer, device=device, backend=backend.name
    ):
        assert held == estimated
        assert has_buffer == backend.takes_rows_in_place(
            PARAMS.token_dtype, one_gpu=device == ONE_GPU, low_precision=True
        )


def quantise_sums_of_the_buffer(
    context: RankContext, backend: str, one: Round
) -> tuple[Problem | None, Tensor]:
    """Body: what sums that are quantised raise of rows in place; then the round's sums."""
    rank = context.rank
    with create(context, PARAMS, backend, **LOW) as communication:
        assert isinstance(communication, OneSidedAlltoAll)
        where = (communication._workspace, communication._layout, rank)
        kernels = named(backend).kernels
        ids, rows = (
            given[rank].to(communication.device) for given in (one.topk_ids, one.hidden_states)
        )
        communication.dispatch(rows, ids)
        buffer = kernels.combine_input_buffer(*where, PARAMS.max_tokens_per_rank, 8, rows.dtype)
        problem = problem_of(
            kernels.combine,
            *where,
            buffer,
            len(ids),
            output_dtype=QuantFormat.MXFP8,
            **LOW,
        )
        ones = torch.ones(len(buffer), PARAMS.hidden_size, dtype=rows.dtype)
        return problem, communication.combine(ones.to(communication.device)).cpu()


@everywhere
def test_rows_of_sums_that_are_quantised_are_none_of_the_buffer(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    one = random_round(PARAMS, (2, 2), seed=1, tokens_per_rank=PARAMS.max_tokens_per_rank)
    results = ranks(2, quantise_sums_of_the_buffer, device=device, backend=backend.name, one=one)
    for (problem, combined), ids in zip(results, one.topk_ids, strict=True):
        expect(problem, MoEEpConfigError, ["quantised on their way"])
        owners = torch.stack([(ids // 2 == rank).any(dim=1) for rank in range(2)])
        assert (combined == owners.sum(dim=0)[:, None]).all()


def create_unlike_the_others(context: RankContext, backend: str) -> Problem | None:
    """Body: what the constructor raises."""
    options = LOW if context.rank == 1 else {}
    return problem_of(create, context, PARAMS, backend, **options)


@everywhere
def test_ranks_that_disagree_about_the_precision_all_learn_of_it(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for problem in ranks(3, create_unlike_the_others, device=device, backend=backend.name):
        words = ["use_low_precision_combine", "rank 1: True", "False"]
        expect(problem, MoEEpConfigError, words)
