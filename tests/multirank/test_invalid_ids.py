"""Are ids that name no expert skipped, recorded and raised, without any harm to the round?"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from moe_ep import MoEEpCommParams, MoEEpInputError
from moe_ep.reference import input_errors
from tests.backends import Backend, every_backend
from tests.conftest import RunOnRanks
from tests.gpu_cases import few_on_gpus
from tests.ranks import RankContext
from tests.rounds import (
    Played,
    Round,
    check_all,
    create,
    ids_of,
    play_round,
    random_round,
    rows_of,
    settled,
)

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(4, 2, 4, 8)
Reports = tuple[str | None, str | None]


def play_with_reports(
    context: RankContext,
    backend: str,
    params: MoEEpCommParams,
    rounds: Sequence[Round],
    ask_between: bool,
) -> tuple[list[Reports], list[Played]]:
    """Body: play, and return for each round what check() and combine() raised.

    ask_between: call check() between dispatch and combine.
    """
    reports, played = [], []
    with create(context, params, backend) as communication:
        combine = communication.combine
        for one in rounds:
            report: list[str | None] = [None, None]

            def combine_with_reports(
                partial: torch.Tensor,
                *,
                output: torch.Tensor | None = None,
                report: list[str | None] = report,
            ) -> torch.Tensor:
                assert output is not None
                if ask_between:
                    try:
                        communication.check()
                    except MoEEpInputError as raised:
                        report[0] = str(raised)
                try:
                    assert settled(communication, combine, partial, output=output) is output
                except MoEEpInputError as raised:
                    report[1] = str(raised)
                return output

            communication.combine = combine_with_reports  # type: ignore[assignment, method-assign]
            played.append(play_round(communication, one, give_output=True))
            reports.append((report[0], report[1]))
        communication.check()
    return reports, played


def reports_of(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    rounds: Sequence[Round],
    ask_between: bool = False,
    params: MoEEpCommParams = PARAMS,
) -> list[list[Reports]]:
    """Return reports[rank][round], after comparing all that was exchanged with the oracle."""
    results = ranks(
        rounds[0].ep_size,
        play_with_reports,
        device=device,
        backend=backend.name,
        params=params,
        rounds=rounds,
        ask_between=ask_between,
    )
    check_all(params, rounds, [played for _, played in results])
    return [reports for reports, _ in results]


def round_with(ids: Sequence[Sequence[int]], dtype: torch.dtype = torch.int64) -> Round:
    """Rank 0 sends these ids, rank 1 good ones."""
    return Round(
        hidden_states=[rows_of(list(range(1, len(ids) + 1)), 8), rows_of([5], 8)],
        topk_ids=[ids_of(ids, 2, dtype), ids_of([[1, 2]], 2, dtype)],
        topk_weights=[torch.full((len(ids), 2), 0.5), torch.full((1, 2), 0.5)],
    )


GOOD = random_round(PARAMS, (4, 3), seed=1)


@every_backend
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_an_id_past_the_last_expert_is_skipped_and_raised_after_combine(
    ranks: RunOnRanks, backend: Backend, device: str, dtype: torch.dtype
) -> None:
    bad = round_with([[0, 2], [0, 4]], dtype)
    reports = reports_of(ranks, backend, device, [GOOD, bad, GOOD])
    assert reports[1] == [(None, None)] * 3
    (before, (_, raised), after) = reports[0]
    assert before == after == (None, None)
    assert raised is not None
    for word in ("rank 0", "token 1", "slot 1", "4"):
        assert word in raised


@every_backend
def test_check_raises_between_dispatch_and_combine_and_combine_then_does_not(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    bad = round_with([[0, 2], [9, 0]])
    reports = reports_of(ranks, backend, device, [bad, GOOD], ask_between=True)
    assert reports[1] == [(None, None)] * 2
    ((raised, then), after) = reports[0]
    assert after == (None, None)
    assert then is None
    assert raised is not None
    for word in ("rank 0", "token 1", "slot 0", "9"):
        assert word in raised


@every_backend
def test_the_first_of_several_is_named_with_their_number(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    bad = round_with([[-1, 3], [0, 77], [78, 79], [2, 1]])
    assert input_errors(PARAMS, bad.topk_ids[0]) == [(1, 1, 77), (2, 0, 78), (2, 1, 79)]
    reports = reports_of(ranks, backend, device, [bad])
    raised = reports[0][0][1]
    assert raised is not None
    for word in ("3", "token 1", "slot 1", "77"):
        assert word in raised


@every_backend
@pytest.mark.parametrize("wrong", [4, 2**31 - 1, 2**32, 2**32 + 1, 2**63 - 1])
@few_on_gpus(wrong=[4, 2**32 + 1, 2**63 - 1])
def test_a_wide_id_is_not_taken_for_another(
    ranks: RunOnRanks, backend: Backend, device: str, wrong: int
) -> None:
    reports = reports_of(ranks, backend, device, [round_with([[wrong, 1], [wrong, wrong]])])
    raised = reports[0][0][1]
    assert raised is not None
    assert str(wrong) in raised


@every_backend
@pytest.mark.parametrize("padding", [-(2**63), -(2**32) + 1, -(2**31) - 1, -1])
@few_on_gpus(padding=[-(2**63), -(2**32) + 1])
def test_a_wide_negative_id_is_padding(
    ranks: RunOnRanks, backend: Backend, device: str, padding: int
) -> None:
    reports = reports_of(ranks, backend, device, [round_with([[padding, 1], [padding] * 2])])
    assert reports == [[(None, None)]] * 2


@every_backend
def test_the_invalid_id_itself_is_padding_and_its_neighbour_is_not(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    params = MoEEpCommParams(4, 2, 4, 8, invalid_expert_id=1000)
    rounds = [round_with([[1000, 1], [-1, 1000]]), round_with([[1001, 1]])]
    reports = reports_of(ranks, backend, device, rounds, params=params)
    assert reports[0][0] == (None, None)
    assert reports[0][1][1] is not None
    assert reports[1] == [(None, None)] * 2


@every_backend
def test_several_ranks_each_raise_their_own(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    one = Round(
        hidden_states=[rows_of([1], 8)] * 3,
        topk_ids=[ids_of([[0, 40]], 2), ids_of([[1, 2]], 2), ids_of([[42, 3]], 2)],
    )
    reports = reports_of(ranks, backend, device, [one])
    first, second, third = (reports[rank][0][1] for rank in range(3))
    assert first is not None
    assert third is not None
    assert "rank 0" in first
    assert "40" in first
    assert second is None
    assert "rank 2" in third
    assert "42" in third


def leave_without_combine(context: RankContext, backend: str) -> str | None:
    """Body: a wrong id in a round that is never combined."""
    communication = create(context, PARAMS, backend)
    bad = round_with([[0, 9]])
    communication.dispatch(
        bad.hidden_states[context.rank].to(communication.device),
        bad.topk_ids[context.rank].to(communication.device),
    )
    try:
        communication.check()
    except MoEEpInputError as raised:
        return str(raised)
    finally:
        communication.destroy()
    return None


@every_backend
def test_check_alone_raises_too(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    raised, nothing = ranks(2, leave_without_combine, device=device, backend=backend.name)
    assert "9" in raised
    assert nothing is None
