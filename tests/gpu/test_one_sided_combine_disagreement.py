"""Do ranks that combine different rows all learn of it, in small steps and in large ones, get NaN
for sums, and play on?
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import MoEEpCommParams, MoEEpConfigError, QuantFormat
from moe_ep._native import Geometry
from moe_ep.collectives import TorchDistributedComm
from moe_ep.symmetric_memory import SymmetricMemory
from tests.backends import EVERYWHERE, Backend, named, on_each
from tests.conftest import RunOnRanks
from tests.problems import Problem, expect, problem_of
from tests.ranks import RankContext
from tests.ranks.devices import ONE_GPU, SPREAD, TIMEOUT_SECONDS

pytestmark = pytest.mark.multirank
SIZE = 2
ODD_ONE = 1
PARAMS = MoEEpCommParams(SIZE, SIZE, 40, 72)
STEPS = (1, 4, 8, 9, 40)
tokens = pytest.mark.parametrize("tokens", STEPS)


class Rank:
    """One rank's rounds, in which every token goes to all ranks and each owner answers ones."""

    def __init__(
        self, context: RankContext, backend: Backend, memory: SymmetricMemory, tokens: int
    ) -> None:
        self._kernels = backend.kernels
        self._where = (memory.workspace, _geometry(context, backend), context.rank)
        self._device = memory.device
        self._tokens = tokens
        self._kernels.initialize(*self._where)
        context.barrier()

    def play(self, dtype: torch.dtype, problems: list[Problem | None], **more: Any) -> Any:
        """Return what combine returns; add to `problems` what it or a check then raises."""
        ids = torch.arange(SIZE, dtype=torch.int32, device=self._device).repeat(self._tokens, 1)
        sent = torch.zeros(self._tokens, PARAMS.hidden_size, dtype=dtype, device=self._device)
        self._kernels.dispatch(
            *self._where, ids, [sent], tokens_per_rank=self._tokens, timeout_sec=TIMEOUT_SECONDS
        )
        ones = torch.ones(SIZE * self._tokens, PARAMS.hidden_size, dtype=dtype, device=self._device)
        result = None

        def combine_and_check() -> None:
            nonlocal result
            result = self._kernels.combine(
                *self._where, ones, self._tokens, timeout_sec=TIMEOUT_SECONDS, **more
            )
            self._kernels.check(*self._where)

        problems.append(problem_of(combine_and_check))
        return result


def _geometry(context: RankContext, backend: Backend) -> Geometry:
    """As if on several GPUs: then small steps are pushed."""
    device = torch.device(context.device)
    return backend.geometry_of(PARAMS, SIZE, device, spans_gpus=True)


def play_rounds(
    context: RankContext,
    backend: str,
    tokens: int,
    odd_dtype: torch.dtype,
    odd_options: dict[str, Any],
) -> tuple[list[Problem | None], list[Tensor | None], Tensor]:
    """Body: two rounds in which one rank combines something else, then one in which all agree.

    Returns what the rounds raised, the sums of the first two if there are any that are not
    quantised, and those of the last.
    """
    assert context.group is not None
    comm = TorchDistributedComm(context.group)
    tested = named(backend)
    size = _geometry(context, tested).segment_bytes
    memory = SymmetricMemory.allocate(comm, size, torch.device(context.device))
    rank = Rank(context, tested, memory, tokens)
    is_odd = context.rank == ODD_ONE
    problems: list[Problem | None] = []
    sums: list[Tensor | None] = []
    for _ in range(2):
        dtype = odd_dtype if is_odd else torch.bfloat16
        got = rank.play(dtype, problems, **(odd_options if is_odd else {}))
        sums.append(got.cpu() if isinstance(got, Tensor) else None)
    last = rank.play(torch.bfloat16, problems).cpu()
    tested.kernels.forget(memory.workspace, _geometry(context, tested), context.rank)
    memory.close()
    return problems, sums, last


def expect_disagreement(results: list[Any]) -> None:
    for problems, sums, last in results:
        for problem in problems[:2]:
            expect(problem, MoEEpConfigError, ["combine", "different"])
        assert problems[2] is None
        assert all(one is None or one.isnan().all() for one in sums)
        assert (last == SIZE).all()


@on_each(having="one_sided", devices=EVERYWHERE)
@tokens
@pytest.mark.parametrize(
    ("odd_dtype", "odd_options"),
    [(torch.float16, {}), (torch.bfloat16, {"use_low_precision_combine": True})],
    ids=["other type", "other precision"],
)
def test_rows_of_another_kind_and_equal_width_are_refused_on_all_ranks(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    tokens: int,
    odd_dtype: torch.dtype,
    odd_options: dict[str, Any],
) -> None:
    expect_disagreement(
        ranks(
            SIZE,
            play_rounds,
            device=device,
            backend=backend.name,
            tokens=tokens,
            odd_dtype=odd_dtype,
            odd_options=odd_options,
        )
    )


@on_each(having="one_sided", devices=(ONE_GPU, SPREAD))
@pytest.mark.parametrize("tokens", [one for one in STEPS if one <= 4])
def test_quantised_sums_on_some_ranks_of_a_small_step_are_refused_on_all(
    ranks: RunOnRanks, backend: Backend, device: str, tokens: int
) -> None:
    """Those that quantise pull what the others push."""
    expect_disagreement(
        ranks(
            SIZE,
            play_rounds,
            device=device,
            backend=backend.name,
            tokens=tokens,
            odd_dtype=torch.bfloat16,
            odd_options={"output_dtype": QuantFormat.MXFP8},
        )
    )
