"""Do communications of different and overlapping groups live side by side?"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    create_communication,
)
from tests.backends import Backend, every_backend
from tests.conftest import RunOnRanks
from tests.gpu_cases import few_on_gpus
from tests.ranks import Outcome, RankContext
from tests.rounds import Played, Round, check, create, play_round, random_round

pytestmark = pytest.mark.multirank
PARAMS = MoEEpCommParams(10, 3, 6, 40)
Members = tuple[int, ...]
PAIRS: list[Members] = [(0, 1), (2, 3)]
CROSSED: list[Members] = [(0, 2), (1, 3)]
LATER: list[Members] = [(1, 2, 3)]
EVERYONE: list[Members] = [(0, 1, 2, 3)]


def round_for(members: Members, index: int) -> Round:
    """The index-th round of a group; no two are alike."""
    seed = 1000 * int("".join(map(str, members))) + index
    return random_round(PARAMS, [(rank + index) % 7 for rank in members], seed)


def play_in_groups(
    context: RankContext, backend: str, steps: Sequence[Sequence[Members]], rounds: int
) -> list[tuple[Members, int, Played]]:
    """Body: at each step join these groups, then play in all of one's groups in turn.

    The first step's communication is destroyed and created again in the middle.
    """
    dist.init_process_group("gloo")
    played: list[tuple[Members, int, Played]] = []
    with contextlib.ExitStack() as stack:
        mine: dict[Members, MoEEpCommunication] = {}
        groups: dict[Members, dist.ProcessGroup] = {}

        def create(members: Members) -> None:
            bootstrap = BootstrapConfig.from_process_group(groups[members], device=context.device)
            mine[members] = create_communication(bootstrap, PARAMS, backend)
            stack.callback(mine[members].destroy)

        def play_everywhere(index: int) -> None:
            for members, communication in mine.items():
                one = round_for(members, index)
                assert communication.ep_size == len(members)
                assert members[communication.ep_rank] == context.rank
                played.append((members, index, play_round(communication, one)))

        index = 0
        for step in steps:
            for members in step:
                group = dist.new_group(members)
                if context.rank in members:
                    assert isinstance(group, dist.ProcessGroup)
                    groups[members] = group
                    create(members)
            for _ in range(rounds):
                play_everywhere(index)
                index += 1
        first = next(iter(mine))
        mine[first].destroy()
        create(first)
        play_everywhere(index)
    dist.barrier()
    return played


@every_backend
@few_on_gpus(steps=[[PAIRS, CROSSED, LATER, EVERYONE], [CROSSED, EVERYONE, PAIRS]])
@pytest.mark.parametrize(
    "steps",
    [
        [PAIRS],
        [PAIRS, CROSSED, LATER, EVERYONE],
        [EVERYONE, LATER, CROSSED, PAIRS],
        [CROSSED, EVERYONE, PAIRS],
    ],
    ids=["pairs", "from small to large", "from large to small", "crossed"],
)
def test_groups_that_overlap_do_not_meet(
    ranks: RunOnRanks, backend: Backend, device: str, steps: list[list[Members]]
) -> None:
    outcomes: list[Outcome] = ranks(
        4,
        play_in_groups,
        device=device,
        dedicated=True,
        backend=backend.name,
        steps=steps,
        rounds=5,
    )
    assert [outcome.error for outcome in outcomes] == [None] * 4
    got = {
        (members, index, rank): one
        for rank, outcome in enumerate(outcomes)
        for members, index, one in outcome.value
    }
    for members, index in {(members, index) for members, index, _ in got}:
        by_rank = [got[members, index, rank] for rank in members]
        check(PARAMS, round_for(members, index), by_rank)
    assert len(got) == sum(len(outcome.value) for outcome in outcomes)


def play_in_two_communications(
    context: RankContext, backend: str, rounds: Sequence[Sequence[Round]]
) -> list[list[Played]]:
    """Body: two communications of one group, their rounds interleaved."""
    with (
        create(context, PARAMS, backend) as one,
        create(context, PARAMS, backend) as other,
    ):
        return [
            [play_round(communication, both[which]) for both in rounds]
            for which, communication in enumerate((one, other))
        ]


@every_backend
def test_two_communications_of_one_group_do_not_meet(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    rounds = [
        (random_round(PARAMS, (6, 0, 3), seed), random_round(PARAMS, (1, 5, 2), seed + 100))
        for seed in range(4)
    ]
    results = ranks(
        3, play_in_two_communications, device=device, backend=backend.name, rounds=rounds
    )
    for index, both in enumerate(rounds):
        for which, one in enumerate(both):
            check(PARAMS, one, [result[which][index] for result in results])
