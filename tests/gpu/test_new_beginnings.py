"""Is a workspace like new after another one was captured in a CUDA graph, and was destroyed,
forgotten, or initialised again? The old graph stays, and is not replayed.
"""

from __future__ import annotations

import pytest
import torch

from moe_ep import MoEEpCommParams, MoEEpCommunication, MoEEpStateError
from tests.backends import Backend, named, on_each, on_shared_gpus
from tests.conftest import RunOnRanks
from tests.gpu.bare_workspace import BareWorkspace, bare_workspace
from tests.gpu.device_rounds import Verdict, capturing, expected_sums, partial_rows, tokens_of
from tests.gpu.recorded import Recorded, steps_of
from tests.problems import Problem, expect, problem_of
from tests.ranks import RankContext
from tests.rounds import create

pytestmark = pytest.mark.multirank
CAPACITIES = (8, 3, 160, 40)
REPLAYS = 3
# Of one size and of others: memory at the same addresses, and not.
ALL_PARAMS = (
    MoEEpCommParams(24, 4, 160, 200),
    MoEEpCommParams(24, 4, 160, 200),
    MoEEpCommParams(30, 8, 160, 72, torch.float32),
    MoEEpCommParams(24, 4, 160, 200),
)
one_sided = on_each(having="one_sided")
sizes = pytest.mark.parametrize("size", [2, 8])


class Life:
    """What one communication does: some rounds eagerly, and replays of their graph."""

    def __init__(self, communication: MoEEpCommunication, first_stamp: int) -> None:
        self._communication = communication
        self._steps, self.verdict = steps_of(communication, CAPACITIES, first_stamp)

    def play(self) -> None:
        communication = self._communication
        for index, step in enumerate(self._steps):
            result = step.dispatch(communication)
            self.verdict.judge_received(index, result, step.received)
            partial = partial_rows(
                communication.params, communication.ep_size, communication.ep_rank, result
            )
            self.verdict.judge_sums(index, communication.combine(partial), step.sums)


def live_again(context: RankContext, backend: str) -> None:
    """Body: one communication after the other, each with a graph; all graphs are kept."""
    graphs = []
    for index, params in enumerate(ALL_PARAMS):
        with create(context, params, backend) as communication:
            life = Life(communication, 10 * index)
            life.play()
            communication.check()
            recorded = Recorded(communication.device, life.play)
            graphs.append(recorded)
            for _ in range(REPLAYS):
                recorded.replay()
            life.play()
            communication.check()
            life.verdict.require()


@on_each(having="workspace")
@sizes
def test_a_new_communication_is_exact_after_one_that_was_captured(
    ranks: RunOnRanks, backend: Backend, device: str, size: int
) -> None:
    ranks(size, live_again, device=device, backend=backend.name, seconds=60)


def capture_the_second_first(context: RankContext, backend: str) -> Problem | None:
    """Body: a communication with a graph, then one of the same sizes, captured at once."""
    with create(context, ALL_PARAMS[0], backend) as first:
        life = Life(first, 0)
        life.play()
        recorded = Recorded(first.device, life.play)
        recorded.replay()
        first.check()
        life.verdict.require()
    with create(context, ALL_PARAMS[0], backend) as second:
        life = Life(second, 10)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, second.device):
            torch.zeros(1, device=second.device)  # a graph with nothing in it is warned of
            problem = problem_of(life.play)
        life.play()
        second.check()
        life.verdict.require()
    return problem


@on_shared_gpus
def test_a_new_communication_has_had_no_round_whatever_lay_at_its_addresses(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for problem in ranks(2, capture_the_second_first, device=device, backend=backend.name):
        expect(problem, MoEEpStateError, ["captured", "eager round"])


def initialise_again(context: RankContext, backend: str) -> None:
    """Body: on the same memory, rounds and a graph, for one geometry after the other."""
    rank, size, device = context.rank, context.size, torch.device(context.device)
    geometries = [named(backend).geometry_of(params, size, device) for params in ALL_PARAMS]
    graphs = []
    segment_bytes = max(one.segment_bytes for one in geometries)
    with bare_workspace(context, backend, segment_bytes) as workspace:
        for index, (params, geometry) in enumerate(zip(ALL_PARAMS, geometries, strict=True)):
            if index == len(ALL_PARAMS) - 1:
                workspace.settle()
                workspace.forget()
            workspace.start(geometry)
            verdict = Verdict(params, size, rank, 1, device)

            def play(
                workspace: BareWorkspace = workspace,
                params: MoEEpCommParams = params,
                verdict: Verdict = verdict,
                index: int = index,
            ) -> None:
                sent = [tokens_of(params, index, source, 5, device) for source in range(size)]
                received, combined, _ = workspace.play(params, sent[rank], 5, zero_copy=False)
                verdict.judge_dispatch(0, received, sent)
                verdict.judge_sums(0, combined, expected_sums(params, size, sent[rank]))

            play()
            workspace.settle()
            recorded = Recorded(device, play)
            graphs.append(recorded)
            for _ in range(REPLAYS):
                recorded.replay()
            play()
            workspace.settle()
            verdict.require()


@one_sided
@sizes
def test_a_workspace_is_exact_after_it_was_initialised_again(
    ranks: RunOnRanks, backend: Backend, device: str, size: int
) -> None:
    ranks(size, initialise_again, device=device, backend=backend.name, seconds=60)
