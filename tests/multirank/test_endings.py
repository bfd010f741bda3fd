"""However a process ends: does it end soon, disturb nobody, and leave nothing behind?"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_ep
from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpStateError,
    MoEEpTimeoutError,
    create_communication,
)
from tests.backends import SHARED_GPUS, Backend, every_backend, on_each, on_the_cpu
from tests.conftest import RunOnRanks
from tests.problems import expect, problem_of
from tests.ranks import RankContext
from tests.ranks.devices import CPU
from tests.ranks.waiting import introduce, outlive
from tests.rounds import Round, play_round, random_round

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(6, 2, 16, 64)
ONE = random_round(PARAMS, (5, 16), seed=1)
THREE = random_round(PARAMS, (5, 16, 0), seed=2)
KEPT: list[Any] = []
SOON = 10
MUCH = 120  # a budget that is not what ends a wait


def new_communication(
    context: RankContext, backend: str, timeout_sec: int = MUCH
) -> MoEEpCommunication:
    bootstrap = BootstrapConfig(context.size, context.rank, device=context.device)
    return create_communication(bootstrap, PARAMS, backend, timeout_sec=timeout_sec)


def dispatch(communication: MoEEpCommunication, one: Round = ONE) -> torch.Tensor:
    rank, device = communication.ep_rank, communication.device
    given = one.hidden_states[rank].to(device), one.topk_ids[rank].to(device)
    return communication.dispatch(*given).hidden_states


def named_files() -> list[str]:
    """Return what this process holds of shared or temporary files that have a name."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    held = {line.split(maxsplit=5)[-1] for line in maps}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            held.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            continue  # the one of the listing itself
    places = ("/dev/shm/", "/tmp/")
    own = (str(Path(moe_ep.__file__).parents[1]), *sys.path[1:])  # the library itself
    named = {name for name in held if name.startswith(places) and not name.startswith(own)}
    # Where it tells its stack; pytest's own.
    return sorted(name for name in named if "/ranks-" not in name and "(deleted)" not in name)


def children() -> list[str]:
    return [
        pid
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]


def destroy_in_turn(context: RankContext, backend: str) -> None:
    three = [new_communication(context, backend) for _ in range(3)]
    for one in three:
        play_round(one, ONE)
    for index in range(3):
        three[(index + context.rank) % 3].destroy()
        time.sleep(0.05 * context.rank)


def lose_the_group_first(context: RankContext, backend: str) -> None:
    communication = new_communication(context, backend)
    play_round(communication, ONE)
    dist.destroy_process_group()
    communication.destroy()


class DestroysWhenCollected:
    def __init__(self, communication: MoEEpCommunication) -> None:
        self.communication = communication
        self.myself = self  # in a cycle

    def __del__(self) -> None:
        self.communication.destroy()


def destroy_in_a_finaliser(context: RankContext, backend: str) -> None:
    DestroysWhenCollected(new_communication(context, backend))
    gc.collect()
    KEPT.append(DestroysWhenCollected(new_communication(context, backend)))  # at the exit


def destroy_at_exit(context: RankContext, backend: str) -> None:
    communication = new_communication(context, backend)
    atexit.register(communication.destroy)
    dispatch(communication)


def fail_in_a_round(context: RankContext, backend: str) -> None:
    with new_communication(context, backend) as communication:
        play_round(communication, ONE)
        received = dispatch(communication)
        if context.rank == 0:
            raise KeyError("of the user's")
        problem = problem_of(lambda: finish(communication, received))
        expect(problem, MoEEpTimeoutError, ["rank 0"])


def leave_early(
    context: RankContext, backend: str, shared: bool, in_round: bool
) -> tuple[Any, float] | None:
    """Body: rank 1 destroys its communication where the others go on; return what they get, and
    how long it took.

    shared: another object, which stays, has the same workspace.
    """
    of_this = context.bootstrap(), PARAMS, backend
    communication = create_communication(*of_this, timeout_sec=60)
    other = create_communication(*of_this) if shared else None
    play_round(communication, THREE)
    received = dispatch(communication, THREE) if in_round else torch.empty(0)
    if context.rank == 1:
        communication.destroy()
        context.barrier()
        assert (other is not None) == shared  # still there
        return None
    started = time.monotonic()
    missed = problem_of(
        lambda: finish(communication, received if in_round else dispatch(communication, THREE))
    )
    seconds = time.monotonic() - started
    context.barrier()  # it still runs
    return missed, seconds


def miss_one_that_leaves(
    ranks: RunOnRanks, backend: Backend, device: str, shared: bool, in_round: bool
) -> None:
    results = ranks(
        3, leave_early, device=device, backend=backend.name, shared=shared, in_round=in_round
    )
    for rank in (0, 2):
        missed, seconds = results[rank]
        expect(missed, MoEEpTimeoutError, ["rank 1", "communication was destroyed"])
        assert seconds < 20


leaving = pytest.mark.parametrize(
    ("shared", "in_round"), [(False, False), (False, True), (True, True)]
)


@on_each(having="workspace", devices=(CPU,))
@leaving
def test_a_rank_that_destroys_its_communication_is_missed_at_once(
    ranks: RunOnRanks, backend: Backend, device: str, shared: bool, in_round: bool
) -> None:
    miss_one_that_leaves(ranks, backend, device, shared, in_round)


@on_each(having="one_sided", devices=SHARED_GPUS)  # in the FIFOs of the others are its last rows
@leaving
def test_a_rank_that_destroys_its_communication_is_missed_at_once_by_kernels(
    ranks: RunOnRanks, backend: Backend, device: str, shared: bool, in_round: bool
) -> None:
    miss_one_that_leaves(ranks, backend, device, shared, in_round)


def finish(communication: MoEEpCommunication, received: torch.Tensor) -> None:
    communication.combine(torch.zeros_like(received))
    communication.check()


def fork_in_between(context: RankContext, backend: str) -> None:
    communication = new_communication(context, backend)
    play_round(communication, ONE)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            expect(problem_of(dispatch, communication), MoEEpStateError, ["forked"])
            assert communication.workspace_bytes == 0
            communication.destroy()
            del communication
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    if context.rank == 0:
        time.sleep(0.3)  # rank 1 looks around what became of it
    play_round(communication, ONE)


def leave_a_thread_waiting(context: RankContext, backend: str) -> None:
    introduce(context)
    communication = new_communication(context, backend)
    play_round(communication, ONE)
    if context.rank == 0:
        KEPT.append(communication)
        begins = threading.Event()

        def wait_in_vain() -> None:
            begins.set()
            dispatch(communication)

        threading.Thread(target=wait_in_vain, daemon=True).start()
        begins.wait()
        return
    outlive(0)


@on_the_cpu
def test_a_process_may_end_while_a_daemon_thread_waits(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    run_to_the_end(ranks, backend, device, leave_a_thread_waiting)


@every_backend
@pytest.mark.parametrize(
    "end",
    [destroy_in_turn, lose_the_group_first, destroy_in_a_finaliser, destroy_at_exit],
    ids=lambda end: end.__name__,
)
def test_a_process_ends_soon_and_leaves_nothing(
    ranks: RunOnRanks, backend: Backend, device: str, end: Callable[..., None]
) -> None:
    run_to_the_end(ranks, backend, device, end)


@on_the_cpu  # CUDA does not work in a forked child
def test_a_fork_disturbs_nobody(ranks: RunOnRanks, backend: Backend, device: str) -> None:
    run_to_the_end(ranks, backend, device, fork_in_between)


def ending(context: RankContext, backend: str, end: Callable[..., None]) -> tuple[Any, Any]:
    end(context, backend)
    return named_files(), children()


def run_to_the_end(
    ranks: RunOnRanks, backend: Backend, device: str, end: Callable[..., None]
) -> None:
    outcomes = ranks(2, ending, device=device, dedicated=True, backend=backend.name, end=end)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    assert [outcome.value for outcome in outcomes] == [([], [])] * 2
    assert all(outcome.seconds < SOON for outcome in outcomes), outcomes


@on_the_cpu
def test_an_exception_on_one_rank_ends_all_of_them(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    outcomes = ranks(
        2, ending, device=device, dedicated=True, backend=backend.name, end=fail_in_a_round
    )
    assert 'KeyError: "of the user\'s"' in outcomes[0].error
    assert outcomes[1].error is None
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    assert all(outcome.seconds < SOON for outcome in outcomes), outcomes


def leave(*_: Any) -> None:
    sys.exit(3)


def be_told_to_end(context: RankContext, backend: str, number: int, handled: bool) -> str | None:
    """Body: rank 0 gets a signal while it waits for rank 1, which then misses it."""
    introduce(context)
    # Over Gloo a handler of Python's runs when the wait has ended.
    communication = new_communication(context, backend, timeout_sec=4)
    play_round(communication, ONE)
    if context.rank == 0:
        if handled:
            signal.signal(number, leave)
        KEPT.append(communication)
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        dispatch(communication)
        raise AssertionError("not ended")
    outlive(0)
    missed = problem_of(lambda: finish(communication, dispatch(communication)))
    expect(missed, MoEEpTimeoutError, ["rank 1", "rank 0"])
    return None


@on_the_cpu
@pytest.mark.parametrize(
    ("number", "handled", "exit_code"),
    [
        (signal.SIGTERM, False, -signal.SIGTERM),
        (signal.SIGTERM, True, 3),
        (signal.SIGINT, False, 128 + signal.SIGINT),
    ],
)
def test_a_signal_in_a_wait_ends_the_process(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    number: signal.Signals,
    handled: bool,
    exit_code: int,
) -> None:
    outcomes = ranks(
        2,
        be_told_to_end,
        device=device,
        dedicated=True,
        backend=backend.name,
        number=number,
        handled=handled,
    )
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [outcome.exit_code for outcome in outcomes] == [exit_code, 0]
    assert all(outcome.seconds < SOON for outcome in outcomes), outcomes
