"""A process is killed: do those that live name it, and go on in the same processes without it?

A client of MPS that is killed while its kernel runs takes the daemon of all along. So here one dies
between kernels, when it has waited for its own.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpStateError,
    MoEEpTimeoutError,
    create_communication,
)
from tests.backends import Backend, on_shared_gpus
from tests.conftest import RunOnRanks
from tests.problems import Problem, expect, problem_of
from tests.ranks import RankContext
from tests.ranks.waiting import introduce, outlive
from tests.rounds import Played, Round, check_all, play_round, random_round, settled

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(10, 4, 7, 24)
SIZE, VICTIM = 3, 1
SURVIVORS = [rank for rank in range(SIZE) if rank != VICTIM]
BUDGET = 4  # of the wait for the dead one; what a busy machine may be late is below it
ROUNDS = 3
SOON = 10


def rounds_of(size: int) -> list[Round]:
    return [
        random_round(PARAMS, [(3 * rank + seed) % 8 for rank in range(size)], seed)
        for seed in range(ROUNDS)
    ]


def dispatch(communication: MoEEpCommunication, one: Round) -> torch.Tensor:
    rank, device = communication.ep_rank, communication.device
    given = one.hidden_states[rank].to(device), one.topk_ids[rank].to(device)
    return communication.dispatch(*given).hidden_states


def lose_one(
    context: RankContext, backend: str, place: str
) -> tuple[Problem | None, float, list[Played]]:
    """Body: one rank dies before its dispatch or its combine. Returns what the others get, after
    how long, and what they play then over a group of theirs.
    """
    introduce(context)
    bootstrap = BootstrapConfig(SIZE, context.rank, device=context.device)
    communication = create_communication(bootstrap, PARAMS, backend, timeout_sec=BUDGET)
    for one in rounds_of(SIZE):
        play_round(communication, one)
    is_open = place == "combine"
    received = dispatch(communication, rounds_of(SIZE)[0]) if is_open else None
    if context.rank == VICTIM:
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    outlive(VICTIM)

    def finish() -> None:
        rows = dispatch(communication, rounds_of(SIZE)[0]) if received is None else received
        settled(communication, communication.combine, torch.zeros_like(rows))

    started = time.monotonic()
    missed = problem_of(finish)
    seconds = time.monotonic() - started
    expect(problem_of(communication.check), MoEEpStateError, ["broken"])
    assert int(torch.arange(1000, device=communication.device).sum()) == 499500
    communication.destroy()

    dist.destroy_process_group()
    there = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore("those that live", TCPStore(*there, is_master=False))
    own = SURVIVORS.index(context.rank)
    bootstrap = BootstrapConfig(len(SURVIVORS), own, device=context.device, tcp_store=store)
    with create_communication(bootstrap, PARAMS, backend, timeout_sec=BUDGET) as again:
        return missed, seconds, [play_round(again, one) for one in rounds_of(len(SURVIVORS))]


@on_shared_gpus
@pytest.mark.parametrize("place", ["dispatch", "combine"])
def test_a_process_that_was_killed_is_named_and_the_others_go_on_over_a_group_of_theirs(
    ranks: RunOnRanks, backend: Backend, device: str, place: str
) -> None:
    outcomes = ranks(
        SIZE, lose_one, device=device, dedicated=True, backend=backend.name, place=place
    )
    assert outcomes[VICTIM].exit_code == -signal.SIGKILL
    alive = [outcomes[rank] for rank in SURVIVORS]
    assert [outcome.error for outcome in alive] == [None] * len(alive)
    for rank, outcome in zip(SURVIVORS, alive, strict=True):
        missed, seconds, _ = outcome.value
        words = [f"rank {rank}", f"rank {VICTIM}", place, f"epoch {ROUNDS + 1} expected"]
        expect(missed, MoEEpTimeoutError, words)
        assert seconds < 2 * BUDGET
        assert outcome.exit_code == 0
        assert outcome.seconds < SOON
    check_all(PARAMS, rounds_of(len(SURVIVORS)), [outcome.value[2] for outcome in alive])
