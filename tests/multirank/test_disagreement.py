"""Do ranks that disagree, about their communication or about a round, all learn of it together?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ep import (
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpConfigError,
    MoEEpDisagreementError,
    MoEEpStateError,
    QuantFormat,
)
from tests.backends import Backend, every_backend, on_each
from tests.conftest import RunOnRanks
from tests.gpu_cases import few_on_gpus
from tests.problems import Problem, expect, ids, problem_of, rows, weights
from tests.ranks import RankContext
from tests.rounds import (
    Played,
    Round,
    check_all,
    create,
    on_device_of,
    play_round,
    random_round,
    settled,
)

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(4, 2, 8, 16)


def create_with(
    context: RankContext, backends: Sequence[str], options: Sequence[dict[str, Any]], one: Round
) -> tuple[Problem | None, list[Played]]:
    """Body: create with this rank's own arguments, then with equal ones."""

    def create_mine() -> None:
        given = dict(options[context.rank])
        sizes = {"num_experts": 4, "top_k": 2, "max_tokens_per_rank": 8, "hidden_size": 16}
        known = {name: given.pop(name) for name in list(given) if name in PARAMS_FIELDS}
        params = MoEEpCommParams(**{**sizes, **known})
        create(context, params, backends[context.rank], **given)

    problem = problem_of(create_mine)
    with create(context, PARAMS, backends[0]) as communication:
        return problem, [play_round(communication, one)]


PARAMS_FIELDS = MoEEpCommParams.__dataclass_fields__
DISAGREEMENTS = {
    "max_tokens_per_rank": (8, 16),
    "hidden_size": (64, 128),
    "num_experts": (4, 6),
    "top_k": (2, 1),
    "dtype": (torch.float16, torch.float32),
    "invalid_expert_id": (-1, 1000),
    "dispatch_format": (None, QuantFormat.MXFP8),
}


@every_backend
@pytest.mark.parametrize("name", DISAGREEMENTS)
@pytest.mark.parametrize("odd_one", [0, 2])
@few_on_gpus(name=["hidden_size", "dispatch_format"], odd_one=[2])
def test_ranks_that_construct_differently_all_get_every_ranks_values(
    ranks: RunOnRanks, backend: Backend, device: str, name: str, odd_one: int
) -> None:
    expect_all_see_the_odd_one(ranks, backend, device, name, odd_one, *DISAGREEMENTS[name])


@on_each(having="statistics")
@pytest.mark.parametrize("odd_one", [0, 2])
@few_on_gpus(odd_one=[2])
def test_ranks_that_expect_different_statistics_all_get_every_ranks_values(
    ranks: RunOnRanks, backend: Backend, device: str, odd_one: int
) -> None:
    name = "eplb_stats_num_experts"
    expect_all_see_the_odd_one(ranks, backend, device, name, odd_one, 0, 4)


@on_each(having="lamport")
@pytest.mark.parametrize(
    ("name", "usual", "odd"),
    [("lamport", None, True), ("lamport", True, False), ("lamport_max_tokens", None, 7)],
)
@pytest.mark.parametrize("odd_one", [0, 2])
@few_on_gpus(odd_one=[2])
def test_ranks_that_expect_other_steps_as_packets_all_get_every_ranks_values(
    ranks: RunOnRanks, backend: Backend, device: str, odd_one: int, name: str, usual: Any, odd: Any
) -> None:
    expect_all_see_the_odd_one(ranks, backend, device, name, odd_one, usual, odd)


def expect_all_see_the_odd_one(
    ranks: RunOnRanks, backend: Backend, device: str, name: str, odd_one: int, usual: Any, odd: Any
) -> None:
    options = [{name: odd if rank == odd_one else usual} for rank in range(3)]
    one = random_round(PARAMS, (3, 0, 2), seed=6)
    results = ranks(
        3, create_with, device=device, backends=[backend.name] * 3, options=options, one=one
    )
    for problem, _ in results:
        shown = [getattr(value, "name", str(value)) for value in (usual, odd)]
        expect(problem, MoEEpConfigError, [name, *shown, f"rank {odd_one}"])
    check_all(PARAMS, [one], [played for _, played in results])


def test_ranks_that_construct_different_backends_all_raise(ranks: RunOnRanks) -> None:
    one = random_round(PARAMS, (3, 2), seed=6)
    results = ranks(2, create_with, backends=["cake", "torch_dist"], options=[{}, {}], one=one)
    for problem, _ in results:
        expect(problem, MoEEpConfigError, ["cake", "torch_dist"])


def dispatch_in_disagreement(
    communication: MoEEpCommunication, given: dict[str, Any]
) -> Problem | None:
    """Return what a dispatch raises about which the ranks disagree, with the round closed.

    The call that raises closes it. On a GPU that call may be `check`, which does not: there combine
    closes the round, and its sums are NaN.
    """
    given = {name: on_device_of(communication, value) for name, value in given.items()}
    problem = problem_of(settled, communication, communication.dispatch, **given)
    params, device = communication.params, communication.device
    tokens_per_rank = given.get("runtime_max_tokens_per_rank", params.max_tokens_per_rank)
    partial = rows(communication.ep_size * tokens_per_rank, params.hidden_size, device=device)
    try:
        combined = settled(communication, communication.combine, partial)
    except MoEEpStateError:  # closed already
        return problem
    assert device.type == "cuda"
    assert combined.shape[0] == len(given["topk_ids"])
    assert combined.isnan().all()
    return problem


def disagree_about_a_round(
    context: RankContext,
    backend: str,
    params: MoEEpCommParams,
    options: dict[str, Any],
    arguments: Sequence[dict[str, Any]],
    rounds: Sequence[Round],
) -> tuple[list[Problem | None], list[Played]]:
    """Body: a good round, one with this rank's own arguments, again, and two good ones."""
    with create(context, params, backend, **options) as communication:
        played = [play_round(communication, rounds[0])]
        given = {
            "hidden_states": rounds[0].hidden_states[context.rank],
            "topk_ids": rounds[0].topk_ids[context.rank],
            **arguments[context.rank],
        }
        problems = [dispatch_in_disagreement(communication, given) for _ in range(2)]
        played += [play_round(communication, later) for later in rounds[1:]]
        return problems, played


def expect_disagreement(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    arguments: Sequence[dict[str, Any]],
    words: Sequence[str],
    params: MoEEpCommParams = PARAMS,
    **options: Any,
) -> None:
    size = len(arguments)
    counts = [3 - rank % 2 for rank in range(size)]
    rounds = [random_round(params, counts, seed) for seed in range(3)]
    results = ranks(
        size,
        disagree_about_a_round,
        device=device,
        backend=backend.name,
        params=params,
        options=options,
        arguments=arguments,
        rounds=rounds,
    )
    for problems, _ in results:
        for problem in problems:
            expect(problem, MoEEpDisagreementError, words)
    check_all(params, rounds, [played for _, played in results])


@every_backend
def test_ranks_with_different_runtime_maxima_all_see_both(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    # On several GPUs steps of 4 tokens go back another way than those of 9.
    arguments = [{"runtime_max_tokens_per_rank": n} for n in (4, 9, 4)]
    words = ["tokens_per_rank", "4", "9", "rank 1", "0", "2"]
    params = replace(PARAMS, max_tokens_per_rank=9)
    expect_disagreement(ranks, backend, device, arguments, words, params)


@every_backend
def test_weights_on_some_ranks_only_are_refused_on_all(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    arguments: list[dict[str, Any]] = [{"topk_weights": weights(3)}, {}]
    expect_disagreement(ranks, backend, device, arguments, ["topk_weights"])


@on_each(having="statistics")
def test_statistics_on_some_ranks_only_are_refused_on_all(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    arguments: list[dict[str, Any]] = [
        {"eplb_local_stats": torch.zeros(4, dtype=torch.int32)},
        {},
    ]
    words = ["eplb_local_stats"]
    expect_disagreement(ranks, backend, device, arguments, words, PARAMS, eplb_stats_num_experts=4)


def dispatch_wide_rows(
    context: RankContext, backend: str, one: Round
) -> tuple[list[Problem | None], list[Played]]:
    options = {"extra_payload_bytes_per_token": 8}
    with create(context, PARAMS, backend, **options) as communication:
        wide = torch.zeros(2, 32 + context.rank, dtype=torch.uint8)
        given = {"hidden_states": wide, "topk_ids": ids(2)}
        problem = dispatch_in_disagreement(communication, given)
        return [problem], [play_round(communication, one)]


@on_each(having="extra_bytes")
def test_rows_of_different_widths_are_refused_on_all_ranks(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    one = random_round(PARAMS, (3, 2), seed=6)
    results = ranks(2, dispatch_wide_rows, device=device, backend=backend.name, one=one)
    for (problem,), _ in results:
        expect(problem, MoEEpDisagreementError, ["32", "33"])
    check_all(PARAMS, [one], [played for _, played in results])
