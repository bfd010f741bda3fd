"""Fixtures of all tests: `ranks` runs a function on real processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest
from hypothesis import settings

from tests.ranks import Outcome
from tests.ranks.fresh import run_fresh
from tests.ranks.launched import LaunchedRanks, is_launched, world_size_problem
from tests.ranks.pool import RankPool
from tests.ranks.processes import start_server

# The same examples every time and on every rank; a body on real processes has no useful deadline.
settings.register_profile("ranks", derandomize=True, database=None, deadline=None)
settings.load_profile("ranks")


class RunOnRanks(Protocol):
    """The `ranks` fixture."""

    def __call__(
        self,
        size: int,
        body: Callable[..., Any],
        /,
        *,
        device: str = "cpu",
        dedicated: bool = False,
        seconds: float = 30,
        **kwargs: Any,
    ) -> list[Any]:
        """Return what `body(context, **kwargs)` returned on each of `size` ranks.

        body: a function at module level; its first argument is a RankContext.
        device: where its RankContext puts tensors.
        dedicated: run in new processes and return an Outcome for each: for bodies that die or
            leave.
        seconds: how long it may take; then every rank's stack is printed and the call fails.
        """
        ...


def pytest_configure() -> None:
    problem = world_size_problem(os.environ)
    if problem is not None:
        raise pytest.UsageError(problem)


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[RankPool | LaunchedRanks]:
    start_server()
    processes = LaunchedRanks() if is_launched(os.environ) else RankPool()
    yield processes
    processes.close()


@pytest.fixture
def ranks(rank_processes: RankPool | LaunchedRanks) -> RunOnRanks:
    def run_on_ranks(
        size: int,
        body: Callable[..., Any],
        /,
        *,
        device: str = "cpu",
        dedicated: bool = False,
        seconds: float = 30,
        **kwargs: Any,
    ) -> list[Any]:
        if not dedicated:
            return rank_processes.run(size, body, kwargs, device=device, seconds=seconds)
        outcomes: list[Outcome]
        if isinstance(rank_processes, LaunchedRanks):
            outcomes = rank_processes.run_fresh(size, body, kwargs, device=device, seconds=seconds)
        else:
            outcomes = run_fresh(size, body, kwargs, device=device, seconds=seconds)
        return outcomes

    return run_on_ranks
