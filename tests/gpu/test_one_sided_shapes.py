"""Are steps of few and of many tokens exact in odd shapes? One workspace, initialised for each of
them anew, so that hundreds of shapes cost no more than the start of one group.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_ep import MoEEpCommParams
from tests.backends import EVERYWHERE, Backend, named, on_each
from tests.conftest import RunOnRanks
from tests.gpu.bare_workspace import bare_workspace
from tests.gpu.device_rounds import Verdict, expected_sums, tokens_of
from tests.ranks import RankContext
from tests.ranks.devices import CPU, ONE_GPU, SPREAD

pytestmark = pytest.mark.multirank
HIDDEN_SIZES = (1, 3, 7, 8, 40, 72, 2880)
# What 512 bytes, and two, four and eight times that, leave over, and what they do not.
HIDDEN_SIZES_OF_MANY = (7, 256, 1000, 1536, 2880, 7168)
# Short blocks, rows that are not of whole 16 bytes, and both.
HIDDEN_SIZES_OF_BLOCKS = (1, 72, 127, 1001, 1160, 2048)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOP_KS = (1, 8, 9, 32)
FEW_TOKENS = 9
MANY_TOKENS = 140  # no step is so small that it goes as one of few
ROUNDS = 4  # of a shape: staged and zero-copy, by turns


def shapes(hidden_sizes: tuple[int, ...], most_tokens: int) -> Iterator[MoEEpCommParams]:
    for h, hidden_size in enumerate(hidden_sizes):
        for d, dtype in enumerate(DTYPES):
            for k, top_k in enumerate(TOP_KS):
                num_experts = (40, 37)[(h + d + k) % 2]  # the same number on all ranks, and not
                yield MoEEpCommParams(num_experts, top_k, most_tokens, hidden_size, dtype)


def play_shapes(
    context: RankContext,
    backend: str,
    hidden_sizes: tuple[int, ...],
    most_tokens: int,
    share_a_gpu: bool,
    low_precision: bool = False,
) -> int:
    """Body: play every shape with other numbers of tokens; return how many rounds that were."""
    rank, size, device = context.rank, context.size, torch.device(context.device)
    all_shapes = list(shapes(hidden_sizes, most_tokens))
    tested = named(backend)
    # Combine pushes what it would pull on one GPU; both work there. Every type and number of picks
    # comes with both: there are three of those, and four of these.
    one_gpu = [
        share_a_gpu and (shape + shape // len(TOP_KS)) % 2 == 0 for shape in range(len(all_shapes))
    ]
    geometries = [
        tested.geometry_of(
            params, size, device, spans_gpus=not together, low_precision=low_precision
        )
        for params, together in zip(all_shapes, one_gpu, strict=True)
    ]
    played = 0
    segment_bytes = max(one.segment_bytes for one in geometries)
    with bare_workspace(context, backend, segment_bytes) as workspace:
        for shape, (params, geometry) in enumerate(zip(all_shapes, geometries, strict=True)):
            workspace.start(geometry)
            verdict = Verdict(params, size, rank, ROUNDS, device)
            in_place = tested.takes_rows_in_place(
                params.token_dtype, one_gpu=one_gpu[shape], low_precision=low_precision
            )
            for index in range(ROUNDS):
                most = most_tokens - (shape + 2 * index) % FEW_TOKENS
                counts = [(most - source * index) % (most + 1) for source in range(size)]
                sent = [tokens_of(params, played, r, n, device) for r, n in enumerate(counts)]
                received, combined, _ = workspace.play(
                    params,
                    sent[rank],
                    most,
                    zero_copy=in_place and index % 2 == 1,
                    low_precision=low_precision,
                )
                verdict.judge_dispatch(index, received, sent)
                wanted = expected_sums(params, size, sent[rank], low_precision=low_precision)
                verdict.judge_sums(index, combined, wanted)
                played += 1
            workspace.settle()
            try:
                verdict.require()
            except AssertionError as wrong:
                raise AssertionError(f"{params}: {wrong}") from None
    return played


@on_each(having="one_sided", devices=EVERYWHERE)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_few_tokens_of_any_shape_are_exact(
    ranks: RunOnRanks, backend: Backend, device: str, size: int
) -> None:
    hidden_sizes = HIDDEN_SIZES[::3] if device == CPU and size > 2 else HIDDEN_SIZES
    played = ranks(
        size,
        play_shapes,
        device=device,
        backend=backend.name,
        hidden_sizes=hidden_sizes,
        most_tokens=FEW_TOKENS,
        share_a_gpu=device == ONE_GPU,
        seconds=100,
    )
    assert played == [len(hidden_sizes) * len(DTYPES) * len(TOP_KS) * ROUNDS] * size


@on_each(having="one_sided", devices=(ONE_GPU, SPREAD))
@pytest.mark.parametrize("size", [2, 4, 8])
def test_many_tokens_of_any_shape_are_exact(
    ranks: RunOnRanks, backend: Backend, device: str, size: int
) -> None:
    played = ranks(
        size,
        play_shapes,
        device=device,
        backend=backend.name,
        hidden_sizes=HIDDEN_SIZES_OF_MANY,
        most_tokens=MANY_TOKENS,
        share_a_gpu=device == ONE_GPU,
        seconds=200,
    )
    assert played == [len(HIDDEN_SIZES_OF_MANY) * len(DTYPES) * len(TOP_KS) * ROUNDS] * size


@on_each(having="low_precision", devices=(ONE_GPU, SPREAD))
@pytest.mark.parametrize("most_tokens", [FEW_TOKENS, MANY_TOKENS])
@pytest.mark.parametrize("size", [2, 8])
def test_steps_in_low_precision_of_any_shape_are_exact(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, most_tokens: int
) -> None:
    played = ranks(
        size,
        play_shapes,
        device=device,
        backend=backend.name,
        hidden_sizes=HIDDEN_SIZES_OF_BLOCKS,
        most_tokens=most_tokens,
        share_a_gpu=device == ONE_GPU,
        low_precision=True,
        seconds=200,
    )
    assert played == [len(HIDDEN_SIZES_OF_BLOCKS) * len(DTYPES) * len(TOP_KS) * ROUNDS] * size
