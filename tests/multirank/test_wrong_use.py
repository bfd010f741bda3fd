"""Does wrong use raise before anything happens, naming the argument, and leave the object ready?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moe_ep import (
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpConfigError,
    MoEEpStateError,
    QuantFormat,
)
from tests.backends import Backend, every_backend
from tests.conftest import RunOnRanks
from tests.gpu_cases import few_on_gpus
from tests.problems import Problem, expect, ids, problem_of, rows, weights
from tests.ranks import RankContext
from tests.rounds import Played, Round, check_all, create, on_device_of, play_round, random_round

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(4, 2, 8, 16)
GOOD = random_round(PARAMS, (3, 3), seed=1)
AFTERWARDS = [random_round(PARAMS, (3, 8), seed=2), random_round(PARAMS, (0, 1), seed=3)]


def dispatch_wrongly(
    context: RankContext,
    backend: str,
    wrong: dict[str, Any],
    rounds: Sequence[Round],
    wrong_ranks: Sequence[int],
) -> tuple[Problem | None, list[Played]]:
    """Body: some ranks give a wrong argument once; then all play good rounds."""
    with create(context, PARAMS, backend) as communication:
        problem = None
        if context.rank in wrong_ranks:
            assert GOOD.topk_weights is not None
            good = {
                "hidden_states": GOOD.hidden_states[context.rank],
                "topk_ids": GOOD.topk_ids[context.rank],
                "topk_weights": GOOD.topk_weights[context.rank],
            }
            given = {
                name: on_device_of(communication, value)
                for name, value in {**good, **wrong}.items()
            }
            problem = problem_of(communication.dispatch, **given)
        return problem, [play_round(communication, one) for one in rounds]


ON_ANOTHER_DEVICE: dict[str, Any] = {"device": "meta"}
WRONG_DISPATCHES: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "ids in one dimension": (
        {"topk_ids": torch.zeros(6, dtype=torch.int32)},
        MoEEpConfigError,
        ["topk_ids", "[6]"],
    ),
    "ids of another length": ({"topk_ids": ids(2)}, MoEEpConfigError, ["topk_ids", "[2, 2]"]),
    "ids with another top_k": ({"topk_ids": ids(3, 3)}, MoEEpConfigError, ["topk_ids", "[3, 3]"]),
    "ids of uint8": ({"topk_ids": ids(3, dtype=torch.uint8)}, TypeError, ["topk_ids", "uint8"]),
    "ids of int16": ({"topk_ids": ids(3, dtype=torch.int16)}, TypeError, ["int32", "int64"]),
    "ids of float32": ({"topk_ids": ids(3, dtype=torch.float32)}, TypeError, ["int32", "int64"]),
    "ids of bool": ({"topk_ids": ids(3, dtype=torch.bool)}, TypeError, ["int32", "int64"]),
    "ids in a list": ({"topk_ids": [[0, 1]] * 3}, TypeError, ["topk_ids", "list"]),
    "ids elsewhere": ({"topk_ids": ids(3, **ON_ANOTHER_DEVICE)}, ValueError, ["topk_ids", "meta"]),
    "rows elsewhere": (
        {"hidden_states": rows(3, **ON_ANOTHER_DEVICE)},
        ValueError,
        ["hidden_states", "meta"],
    ),
    "rows in three dimensions": (
        {"hidden_states": rows(3)[None]},
        MoEEpConfigError,
        ["hidden_states", "[1, 3, 16]"],
    ),
    "rows of another width": (
        {"hidden_states": rows(3, 15)},
        MoEEpConfigError,
        ["hidden_states", "16", "15"],
    ),
    "rows of another dtype": (
        {"hidden_states": rows(3, dtype=torch.float16)},
        TypeError,
        ["hidden_states", "bfloat16", "float16"],
    ),
    "rows as bytes": (
        {"hidden_states": rows(3, 32, dtype=torch.uint8)},
        TypeError,
        ["hidden_states", "bfloat16", "uint8"],
    ),
    "too many rows": (
        {"hidden_states": rows(9), "topk_ids": ids(9), "topk_weights": weights(9)},
        MoEEpConfigError,
        ["hidden_states", "9", "8", "max_tokens_per_rank"],
    ),
    "more rows than the runtime maximum": (
        {"runtime_max_tokens_per_rank": 2},
        MoEEpConfigError,
        ["runtime_max_tokens_per_rank", "2", "3"],
    ),
    "a runtime maximum above the maximum": (
        {"runtime_max_tokens_per_rank": 9},
        MoEEpConfigError,
        ["runtime_max_tokens_per_rank", "9", "8"],
    ),
    "a negative runtime maximum": (
        {"runtime_max_tokens_per_rank": -1},
        MoEEpConfigError,
        ["runtime_max_tokens_per_rank", "-1"],
    ),
    "a runtime maximum that is no number": (
        {"runtime_max_tokens_per_rank": 3.0},
        TypeError,
        ["runtime_max_tokens_per_rank", "3.0"],
    ),
    "weights of bfloat16": (
        {"topk_weights": weights(3, dtype=torch.bfloat16)},
        TypeError,
        ["topk_weights", "float32", "bfloat16"],
    ),
    "weights of float64": (
        {"topk_weights": weights(3, dtype=torch.float64)},
        TypeError,
        ["topk_weights", "float32", "float64"],
    ),
    "weights of another shape": (
        {"topk_weights": weights(3, 3)},
        MoEEpConfigError,
        ["topk_weights", "[3, 3]"],
    ),
    "weights elsewhere": (
        {"topk_weights": weights(3, **ON_ANOTHER_DEVICE)},
        ValueError,
        ["topk_weights", "meta"],
    ),
    "scales for a format without": (
        {"hidden_states_scale": weights(3, 1)},
        MoEEpConfigError,
        ["hidden_states_scale"],
    ),
    "statistics that were not enabled": (
        {"eplb_local_stats": torch.zeros(4, dtype=torch.int32)},
        MoEEpConfigError,
        ["eplb_local_stats", "eplb_stats_num_experts"],
    ),
}


@every_backend
@pytest.mark.parametrize("case", WRONG_DISPATCHES)
@few_on_gpus(case=["ids of int16", "too many rows", "rows elsewhere"])
def test_a_wrong_argument_of_dispatch_on_all_ranks_is_named_and_changes_nothing(
    ranks: RunOnRanks, backend: Backend, device: str, case: str
) -> None:
    wrong, error, words = WRONG_DISPATCHES[case]
    results = ranks(
        2,
        dispatch_wrongly,
        device=device,
        backend=backend.name,
        wrong=wrong,
        rounds=AFTERWARDS,
        wrong_ranks=[0, 1],
    )
    for problem, _ in results:
        expect(problem, error, words)
    check_all(PARAMS, AFTERWARDS, [played for _, played in results])


@every_backend
@pytest.mark.parametrize("case", ["ids of int16", "too many rows", "rows elsewhere"])
@few_on_gpus(case=["too many rows"])
def test_a_wrong_argument_on_one_rank_is_that_ranks_business(
    ranks: RunOnRanks, backend: Backend, device: str, case: str
) -> None:
    wrong, error, words = WRONG_DISPATCHES[case]
    results = ranks(
        2,
        dispatch_wrongly,
        device=device,
        backend=backend.name,
        wrong=wrong,
        rounds=AFTERWARDS,
        wrong_ranks=[1],
    )
    assert results[0][0] is None
    expect(results[1][0], error, words)
    check_all(PARAMS, AFTERWARDS, [played for _, played in results])


SCALED = MoEEpCommParams(4, 2, 8, 200, dispatch_format=QuantFormat.DeepSeekFp8)


def give_wrong_scales(
    context: RankContext, backend: str, wrong: torch.Tensor | None, one: Round
) -> tuple[Problem | None, list[Played]]:
    with create(context, SCALED, backend) as communication:
        problem = problem_of(
            communication.dispatch,
            one.hidden_states[context.rank].to(communication.device),
            one.topk_ids[context.rank].to(communication.device),
            hidden_states_scale=on_device_of(communication, wrong),
        )
        return problem, [play_round(communication, one)]


@every_backend
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (None, MoEEpConfigError),
        (torch.zeros(3, 1), MoEEpConfigError),
        (torch.zeros(2, 2), MoEEpConfigError),
        (torch.zeros(3, 2, dtype=torch.float16), TypeError),
    ],
)
@few_on_gpus(wrong=[None])
def test_wrong_scale_rows_are_named(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    wrong: torch.Tensor | None,
    error: type[Exception],
) -> None:
    one = random_round(SCALED, (3, 3), seed=4)
    results = ranks(2, give_wrong_scales, device=device, backend=backend.name, wrong=wrong, one=one)
    for problem, _ in results:
        expect(problem, error, ["hidden_states_scale"])
    check_all(SCALED, [one], [played for _, played in results])


WRONG_COMBINES: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "too few rows": ({"expert_output": rows(15)}, MoEEpConfigError, ["expert_output", "[15, 16]"]),
    "another width": ({"expert_output": rows(16, 17)}, MoEEpConfigError, ["expert_output", "17"]),
    "another dtype": (
        {"expert_output": rows(16, dtype=torch.float32)},
        TypeError,
        ["expert_output", "bfloat16", "float32"],
    ),
    "rows elsewhere": (
        {"expert_output": rows(16, **ON_ANOTHER_DEVICE)},
        ValueError,
        ["expert_output", "meta"],
    ),
    "blocks of another size": (
        {"expert_output": rows(16).view(4, 4, 16)},
        MoEEpConfigError,
        ["expert_output", "[4, 4, 16]"],
    ),
    "an output that is too small": (
        {"output": rows(2)},
        MoEEpConfigError,
        ["output", "[3, 16]", "[2, 16]"],
    ),
    "an output that is too large": (
        {"output": rows(4)},
        MoEEpConfigError,
        ["output", "[3, 16]", "[4, 16]"],
    ),
    "an output of another dtype": (
        {"output": rows(3, dtype=torch.float32)},
        TypeError,
        ["output", "bfloat16", "float32"],
    ),
    "an output elsewhere": (
        {"output": rows(3, **ON_ANOTHER_DEVICE)},
        ValueError,
        ["output", "meta"],
    ),
}


def combine_wrongly(
    context: RankContext, backend: str, wrong: dict[str, Any], one: Round, rounds: Sequence[Round]
) -> tuple[Problem | None, list[Played]]:
    """Body: combine with a wrong argument in an open round, then close it well and go on."""
    with create(context, PARAMS, backend) as communication:
        combine = communication.combine
        problem = None

        def wrong_first(*args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal problem
            given = {name: on_device_of(communication, value) for name, value in wrong.items()}
            problem = problem_of(combine, **{"expert_output": args[0], **given})
            return combine(*args, **kwargs)

        communication.combine = wrong_first  # type: ignore[method-assign]
        first = play_round(communication, one)
        communication.combine = combine  # type: ignore[method-assign]
        return problem, [first, *[play_round(communication, later) for later in rounds]]


@every_backend
@pytest.mark.parametrize("case", WRONG_COMBINES)
@few_on_gpus(case=["too few rows", "an output elsewhere"])
def test_a_wrong_argument_of_combine_is_named_and_leaves_the_round_open(
    ranks: RunOnRanks, backend: Backend, device: str, case: str
) -> None:
    wrong, error, words = WRONG_COMBINES[case]
    results = ranks(
        2,
        combine_wrongly,
        device=device,
        backend=backend.name,
        wrong=wrong,
        one=GOOD,
        rounds=AFTERWARDS,
    )
    for problem, _ in results:
        expect(problem, error, words)
    check_all(PARAMS, [GOOD, *AFTERWARDS], [played for _, played in results])


def call_out_of_order(
    context: RankContext, backend: str
) -> tuple[dict[str, Problem | None], list[Played]]:
    problems: dict[str, Problem | None] = {}
    with create(context, PARAMS, backend) as communication:
        partial = rows(16, device=communication.device)
        problems["combine before dispatch"] = problem_of(communication.combine, partial)
        problems["buffer before dispatch"] = problem_of(
            communication.get_combine_input_buffer, torch.bfloat16
        )
        combine = communication.combine

        def dispatch_again_first(*args: Any, **kwargs: Any) -> torch.Tensor:
            problems["dispatch twice"] = problem_of(
                communication.dispatch,
                GOOD.hidden_states[context.rank].to(communication.device),
                GOOD.topk_ids[context.rank].to(communication.device),
            )
            return combine(*args, **kwargs)

        communication.combine = dispatch_again_first  # type: ignore[method-assign]
        played = [play_round(communication, GOOD)]
        communication.combine = combine  # type: ignore[method-assign]
        problems["combine twice"] = problem_of(combine, partial)
        problems["buffer after combine"] = problem_of(
            communication.get_combine_input_buffer, torch.bfloat16
        )
        played += [play_round(communication, one) for one in AFTERWARDS]
    communication.destroy()  # again
    problems.update(
        {
            f"{name} after destroy": problem_of(call)
            for name, call in calls_on(communication, context.rank).items()
        }
    )
    return problems, played


def calls_on(communication: MoEEpCommunication, rank: int) -> dict[str, Any]:
    device = communication.device
    return {
        "dispatch": lambda: communication.dispatch(
            GOOD.hidden_states[rank].to(device), GOOD.topk_ids[rank].to(device)
        ),
        "combine": lambda: communication.combine(rows(16, device=device)),
        "buffer": lambda: communication.get_combine_input_buffer(torch.bfloat16),
        "check": communication.check,
        "with": communication.__enter__,
    }


@every_backend
def test_calls_out_of_order_raise_a_state_error_and_disturb_nothing(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    results = ranks(2, call_out_of_order, device=device, backend=backend.name)
    for problems, _ in results:
        assert len(problems) == 10
        for call, problem in problems.items():
            expect(problem, MoEEpStateError, ["destroy"] if "destroy" in call else [])
    check_all(PARAMS, [GOOD, *AFTERWARDS], [played for _, played in results])


def destroy_in_an_open_round(context: RankContext, backend: str) -> Problem | None:
    communication = create(context, PARAMS, backend)
    device = communication.device
    communication.dispatch(
        GOOD.hidden_states[context.rank].to(device), GOOD.topk_ids[context.rank].to(device)
    )
    communication.destroy()
    return problem_of(communication.combine, rows(16, device=device))


@every_backend
def test_destroy_is_legal_in_an_open_round(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for problem in ranks(2, destroy_in_an_open_round, device=device, backend=backend.name):
        expect(problem, MoEEpStateError, ["combine", "destroy"])


@pytest.mark.parametrize("top_k", [0, -1, 33])
def test_top_k_outside_its_limits_names_value_and_limit(top_k: int) -> None:
    with pytest.raises(MoEEpConfigError, match="top_k") as raised:
        MoEEpCommParams(64, top_k, 8, 16)
    assert "32" in str(raised.value)
    assert str(top_k) in str(raised.value)
