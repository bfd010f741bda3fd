"""Is every wait bounded, does its error say who, where and when, and can the process then leave?"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpStateError,
    MoEEpTimeoutError,
    create_communication,
)
from moe_ep.reference import token_destinations
from tests.backends import ALL, Backend, naming_silent_peers, on_each, on_the_cpu
from tests.conftest import RunOnRanks
from tests.gpu_cases import few_on_gpus
from tests.ranks import RankContext
from tests.ranks.devices import ONE_GPU
from tests.ranks.waiting import hear, introduce, meet, outlive, tell
from tests.rounds import check, play_round, random_round, settled

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(8, 3, 5, 24)
BUDGET = 4  # that of a wait for a peer that is silent; what a busy machine may be late is below it
SOON = 5  # on a machine with other work; without, a few tenths of a second
MUCH = 60  # a budget that is not what ends a wait


@dataclass(frozen=True)
class Waited:
    """What a rank saw that waited for a peer: the error's text, how long it took, and the next
    call's state error.
    """

    error: str
    seconds: float
    next_call: str


def open_communication(context: RankContext, backend: str, seconds: int) -> MoEEpCommunication:
    bootstrap = BootstrapConfig(context.size, context.rank, device=context.device)
    return create_communication(bootstrap, PARAMS, backend, timeout_sec=seconds)


def round_number(index: int, size: int) -> Any:
    return random_round(PARAMS, [(rank + index) % 6 for rank in range(size)], seed=index)


def dispatch_round(communication: MoEEpCommunication, index: int) -> Any:
    one = round_number(index, communication.ep_size)
    rank, device = communication.ep_rank, communication.device
    return communication.dispatch(one.hidden_states[rank].to(device), one.topk_ids[rank].to(device))


def any_partial(communication: MoEEpCommunication) -> torch.Tensor:
    rows = communication.ep_size * PARAMS.max_tokens_per_rank
    return torch.zeros(rows, PARAMS.hidden_size, dtype=torch.bfloat16, device=communication.device)


def expect_timeout(communication: MoEEpCommunication, call: Any) -> Waited:
    started = time.monotonic()
    try:
        settled(communication, call)
    except MoEEpTimeoutError as raised:
        seconds, error = time.monotonic() - started, str(raised)
    else:
        raise AssertionError("the call returned")
    try:
        dispatch_round(communication, 0)
    except MoEEpStateError as raised:
        return Waited(error, seconds, str(raised))
    raise AssertionError("the next call did not raise")


def meet_a_silent_peer(
    context: RankContext, backend: str, silent: int, full_rounds: int, silent_in: str
) -> Waited | None:
    """Body: after some rounds one rank falls silent before its next dispatch or combine, until the
    other one has missed it, and left without waiting for it.
    """
    introduce(context)
    communication = open_communication(context, backend, BUDGET)
    for index in range(full_rounds):
        play_round(communication, round_number(index, context.size))
    if context.rank == silent:
        if silent_in == "combine":
            dispatch_round(communication, full_rounds)
        outlive(1 - silent)
        return None
    if silent_in == "dispatch":
        return expect_timeout(communication, lambda: dispatch_round(communication, full_rounds))
    dispatch_round(communication, full_rounds)
    return expect_timeout(communication, lambda: communication.combine(any_partial(communication)))


SILENCES = [("dispatch", 0), ("dispatch", 3), ("combine", 3)]


def a_silence(backend: Backend, silent_in: str, full_rounds: int) -> dict[str, Any]:
    how = {"silent": 1, "silent_in": silent_in, "full_rounds": full_rounds}
    return {"backend": backend.name, **how}


@naming_silent_peers
@few_on_gpus(full_rounds=[3])
@pytest.mark.parametrize(("silent_in", "full_rounds"), SILENCES)
def test_a_peer_that_never_calls_is_named_with_phase_and_epoch(
    ranks: RunOnRanks, backend: Backend, device: str, silent_in: str, full_rounds: int
) -> None:
    among = [a_silence(one, *silence) for one in ALL for silence in SILENCES]
    how = a_silence(backend, silent_in, full_rounds)
    outcomes = ranks.waiting(2, meet_a_silent_peer, among, device=device, **how)
    assert [outcome.error for outcome in outcomes] == [None, None]
    waited = outcomes[0].value
    assert BUDGET <= waited.seconds < 2 * BUDGET
    epoch = full_rounds + 1
    for word in ("rank 0", "rank 1", silent_in, f"epoch {epoch} expected"):
        assert word in waited.error
    # What can be done about it.
    assert ("reinitialize" in waited.error and "mask" in waited.error) == backend.workspace
    assert re.search(r"re-create the \w+, without it if it is dead\.$", waited.error), waited.error
    assert "re-create" in waited.next_call
    assert ("reinitialize" in waited.next_call) == backend.workspace
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]


def meet_a_slow_peer(context: RankContext, backend: str, nap: float) -> Any:
    with open_communication(context, backend, 30) as communication:
        if context.rank == 1:
            time.sleep(nap)
        return play_round(communication, round_number(0, context.size))


def fall_silent_after_a_slow_start(
    context: RankContext, backend: str, budget: int, start: float
) -> tuple[Any, Waited | None]:
    """Body: rank 1 comes late to its first round, as one that compiles, and to no other."""
    introduce(context)
    meet("the beginning", context.size)
    communication = open_communication(context, backend, budget)
    if context.rank == 1:
        time.sleep(start)
    played = play_round(communication, round_number(0, context.size))
    if context.rank == 1:
        outlive(0)
        return played, None
    return played, expect_timeout(communication, lambda: dispatch_round(communication, 1))


SHORT_BUDGETS = [(1, 0.5), (2, 1)]  # beside no more runs than these: they have the least to spare
LONG_BUDGETS = [(BUDGET, 1), (30, 20)]


def a_slow_start(backend: str, budget: int, start: float) -> dict[str, Any]:
    return {"backend": backend, "budget": budget, "start": start}


@on_the_cpu
@pytest.mark.parametrize(("budget", "start"), SHORT_BUDGETS + LONG_BUDGETS)
def test_each_wait_has_the_whole_budget_and_no_more(
    ranks: RunOnRanks, backend: Backend, device: str, budget: int, start: float
) -> None:
    if budget != BUDGET and backend.name != "cake":
        pytest.skip("one backend has shown that the number is what is waited")
    is_short = (budget, start) in SHORT_BUDGETS
    among = [a_slow_start("cake", *one) for one in (SHORT_BUDGETS if is_short else LONG_BUDGETS)]
    if not is_short:
        among += [a_slow_start(one.name, BUDGET, 1) for one in ALL if one.name != "cake"]
    how = a_slow_start(backend.name, budget, start)
    outcomes = ranks.waiting(2, fall_silent_after_a_slow_start, among, device=device, **how)
    assert [outcome.error for outcome in outcomes] == [None, None]
    check(PARAMS, round_number(0, 2), [outcome.value[0] for outcome in outcomes])
    assert budget <= outcomes[0].value[1].seconds < budget + min(budget, 5)


def combine_with_a_silent_peer(context: RankContext, backend: str) -> torch.Tensor | None:
    """Body: the output of a combine that rank 1 never joined."""
    introduce(context)
    communication = open_communication(context, backend, BUDGET)
    one = random_round(PARAMS, [5] * context.size, seed=1, padding=0)
    device = communication.device
    play_round(communication, one)
    communication.dispatch(
        one.hidden_states[context.rank].to(device), one.topk_ids[context.rank].to(device)
    )
    if context.rank == 1:
        outlive(0)
        return None
    output = communication.combine(any_partial(communication))
    try:
        communication.check()
    except MoEEpTimeoutError:
        return output.cpu()
    raise AssertionError("the peer was not missed")


@on_each(having="workspace", devices=(ONE_GPU,))
def test_the_sums_that_a_silent_peer_has_a_part_in_are_nan(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    """On the CPU there is no output: the call itself raises."""
    outcomes = ranks(
        2,
        combine_with_a_silent_peer,
        device=device,
        dedicated=True,
        backend=backend.name,
    )
    assert [outcome.error for outcome in outcomes] == [None, None]
    ids = random_round(PARAMS, [5] * 2, seed=1, padding=0).topk_ids[0]
    needs_rank_1 = token_destinations(PARAMS, 2, ids)[:, 1]
    assert needs_rank_1.any()
    assert outcomes[0].value[needs_rank_1].isnan().all()


@naming_silent_peers
def test_a_slow_peer_within_the_budget_is_waited_for(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    among = [{"backend": one.name, "nap": 5} for one in ALL]
    how = {"backend": backend.name, "nap": 5}
    outcomes = ranks.waiting(2, meet_a_slow_peer, among, device=device, **how)
    assert [outcome.error for outcome in outcomes] == [None, None]
    check(PARAMS, round_number(0, 2), [outcome.value for outcome in outcomes])


def lose_a_peer(context: RankContext, backend: str, victim: int, place: str) -> Waited | None:
    """Body: one rank is killed inside its tenth round."""
    communication = open_communication(context, backend, MUCH)
    for index in range(9):
        play_round(communication, round_number(index, context.size))
    if context.rank == victim:
        if place == "combine":
            dispatch_round(communication, 9)
        os.kill(os.getpid(), signal.SIGKILL)

    def last_round() -> None:
        dispatch_round(communication, 9)
        communication.combine(any_partial(communication))

    missed = expect_timeout(communication, last_round)
    meet("all have missed it", context.size - 1)  # over Gloo, one that leaves is missed, too
    return missed


# A client that is killed while its kernel waits takes the MPS daemon of all ranks along.
@on_the_cpu
@pytest.mark.parametrize("place", ["dispatch", "combine"])
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (4, 2)])
def test_a_peer_that_is_killed_is_named_long_before_the_budget_is_spent(
    ranks: RunOnRanks, backend: Backend, device: str, size: int, victim: int, place: str
) -> None:
    outcomes = ranks(
        size,
        lose_a_peer,
        device=device,
        dedicated=True,
        backend=backend.name,
        victim=victim,
        place=place,
    )
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.exit_code == -signal.SIGKILL
            continue
        assert outcome.error is None, outcome.error
        assert outcome.value.seconds < SOON
        assert not backend.workspace or "whose process has ended" in outcome.value.error
        for word in (f"rank {rank}", f"rank {victim}", place, "epoch 10 expected"):
            assert word in outcome.value.error
        assert outcome.exit_code == 0


def be_interrupted(context: RankContext, backend: str, budget: int) -> float | None:
    """Body: rank 0 gets Ctrl-C while it waits for a peer that is silent."""
    introduce(context)
    communication = open_communication(context, backend, budget)
    play_round(communication, round_number(0, context.size))
    if context.rank == 1:
        outlive(0)
        return None
    started = time.monotonic()
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        dispatch_round(communication, 1)
    except KeyboardInterrupt:
        return time.monotonic() - started
    raise AssertionError("not interrupted")


# On a GPU no call waits: the device does.
@on_the_cpu
def test_ctrl_c_ends_a_wait_or_is_raised_at_the_latest_when_the_wait_ends(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    budget, limit = (300, SOON) if backend.interruptible else (BUDGET, 2 * BUDGET)
    outcomes = ranks(
        2, be_interrupted, device=device, dedicated=True, backend=backend.name, budget=budget
    )
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert outcomes[0].value < limit
    assert outcomes[0].exit_code == 0


def destroy_after_timeout(context: RankContext, backend: str) -> Any:
    """Body: rank 1 skips a round; both then create a new communication over a new group."""
    communication = open_communication(context, backend, BUDGET)
    if context.rank == 0:
        expect_timeout(communication, lambda: dispatch_round(communication, 0))
        tell("missed")
    else:
        hear("missed")
    communication.destroy()
    torch.distributed.destroy_process_group()
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    bootstrap = BootstrapConfig(
        context.size,
        context.rank,
        device=context.device,
        tcp_store=PrefixStore("again", store),
    )
    with create_communication(bootstrap, PARAMS, backend, timeout_sec=MUCH) as again:
        return play_round(again, round_number(1, context.size))


@naming_silent_peers
def test_a_new_communication_works_after_a_timeout(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    of_each = [{"backend": one.name} for one in ALL]
    body = {"device": device, "backend": backend.name}
    outcomes = ranks.waiting(2, destroy_after_timeout, of_each, **body)
    assert [outcome.error for outcome in outcomes] == [None, None]
    check(PARAMS, round_number(1, 2), [outcome.value for outcome in outcomes])
