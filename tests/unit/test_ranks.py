"""Do the test processes report what happens to them, and leave nothing behind?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.bits import assert_same_bits
from tests.conftest import RunOnRanks
from tests.ranks import Outcome, RankContext
from tests.ranks.launched import is_launched, world_size_problem
from tests.ranks.processes import RankFailedError
from tests.ranks.waiting import is_running

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(is_launched(os.environ), reason="about the processes of the pool")


def who_am_i(context: RankContext) -> tuple[int, int, int]:
    context.barrier()
    return context.rank, dist.get_rank(context.group), dist.get_world_size(context.group)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_body_runs_on_each_rank_of_a_group_of_the_size(ranks: RunOnRanks, size: int) -> None:
    assert ranks(size, who_am_i) == [(rank, rank, size) for rank in range(size)]


def echo(context: RankContext, value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(24, dtype=torch.int32).view(4, 6)[:, ::2],
        torch.tensor([-0.0, float("nan")], dtype=torch.bfloat16),
        torch.tensor(3.0),
        torch.zeros(0, 5, dtype=torch.float8_e4m3fn),
    ],
)
def test_a_tensor_comes_back_bit_for_bit(ranks: RunOnRanks, value: torch.Tensor) -> None:
    (back,) = ranks(1, echo, value=value)
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert_same_bits(back, value)


def raise_on(context: RankContext, rank: int) -> None:
    if context.rank == rank:
        raise ValueError("something is wrong here")
    context.barrier()


def test_an_exception_on_one_rank_is_reported_with_its_rank_and_the_stacks_of_those_that_wait(
    ranks: RunOnRanks,
) -> None:
    with pytest.raises(RankFailedError) as failed:
        ranks(2, raise_on, rank=1)
    message = str(failed.value)
    assert "rank 1 raised" in message
    assert "ValueError: something is wrong here" in message
    assert "rank 0 did not end" in message
    assert "raise_on" in message.partition("stack of rank 0")[2]
    assert ranks(2, who_am_i) == [(0, 0, 2), (1, 1, 2)]  # the next body finds new ranks


def oversleep(context: RankContext) -> None:
    time.sleep(600)


def test_a_body_that_does_not_end_shows_every_ranks_stack(ranks: RunOnRanks) -> None:
    with pytest.raises(RankFailedError, match="rank 1 did not end") as failed:
        ranks(2, oversleep, seconds=3)
    assert str(failed.value).count("in oversleep") == 2


def die(context: RankContext, rank: int) -> None:
    if context.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_is_named_with_its_exit_code(ranks: RunOnRanks) -> None:
    with pytest.raises(RankFailedError, match="rank 2 died with exit code -9"):
        ranks(3, die, rank=2)


def leave(context: RankContext, codes: list[int]) -> str:
    if codes[context.rank]:
        sys.exit(codes[context.rank])
    return "fine"


def test_a_fresh_rank_returns_its_exit_code_and_value(ranks: RunOnRanks) -> None:
    outcomes: list[Outcome] = ranks(2, leave, dedicated=True, codes=[0, 3])
    assert [outcome.exit_code for outcome in outcomes] == [0, 3]
    assert [outcome.value for outcome in outcomes] == ["fine", None]


def test_a_fresh_rank_that_is_killed_has_the_signal_as_exit_code(ranks: RunOnRanks) -> None:
    outcomes = ranks(2, die, dedicated=True, rank=0)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL, 0]


def answer(context: RankContext, number: int) -> tuple[int, int]:
    if number == 3:
        os._exit(4)
    return number, os.getpid()


def test_each_case_of_a_body_that_waits_gets_what_its_own_ranks_returned(ranks: RunOnRanks) -> None:
    among = [{"number": number} for number in range(6)]
    processes = set()
    for number in (5, 0, 1, 2, 4, 4):  # one of them twice
        outcomes = ranks.waiting(2, answer, among, device="cpu", number=number)
        assert [(one.exit_code, one.value[0]) for one in outcomes] == [(0, number)] * 2
        processes |= {one.value[1] for one in outcomes}
    assert len(processes) == 12
    died = ranks.waiting(2, answer, among, device="cpu", number=3)
    assert [(one.exit_code, one.value) for one in died] == [(4, None)] * 2


def default_group(context: RankContext) -> tuple[int, int]:
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_rank(), dist.get_world_size()


def test_a_fresh_rank_finds_the_environment_of_torchrun(ranks: RunOnRanks) -> None:
    outcomes = ranks(3, default_group, dedicated=True)
    assert [outcome.value for outcome in outcomes] == [(0, 3), (1, 3), (2, 3)]


def test_ranks_do_not_outlive_a_session_that_is_killed() -> None:
    program = """
import time
from tests.ranks.pool import RankPool
from tests.ranks.processes import start_server
from tests.unit.test_ranks import own_pid

start_server()
print(RankPool().run(8, own_pid, {}), flush=True)
time.sleep(600)
"""
    session = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert session.stdout is not None
    pids = json.loads(session.stdout.readline())
    session.kill()
    session.wait()
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 8
    assert [pid for pid in pids if is_running(pid)] == []


def own_pid(context: RankContext) -> int:
    return os.getpid()


@pytest.mark.parametrize("rank", ["RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_a_distributed_run_without_world_size_is_refused(rank: str) -> None:
    problem = world_size_problem({rank: "1"})
    assert problem is not None
    assert rank in problem
    assert "WORLD_SIZE" in problem


def test_a_run_under_torchrun_or_alone_is_accepted() -> None:
    assert world_size_problem({}) is None
    assert world_size_problem({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}) is None


def test_pytest_stops_at_once_where_world_size_is_missing() -> None:
    environment = {**os.environ, "RANK": "0"}
    environment.pop("WORLD_SIZE", None)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", __file__],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "WORLD_SIZE" in result.stderr
