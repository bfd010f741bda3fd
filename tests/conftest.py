"""Fixtures of all tests: `ranks` runs a function on real processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.gpu_cases import is_left_out
from tests.ranks import Outcome, devices
from tests.ranks.launched import (
    LaunchedRanks,
    is_launched,
    take_share_of_gpu,
    world_size_problem,
)
from tests.ranks.pool import RankPool
from tests.ranks.process import spare_the_collector
from tests.ranks.processes import PATIENCE_SECONDS, start_server

# The same examples every time and on every rank; a body on real processes has no useful deadline.
settings.register_profile("ranks", derandomize=True, database=None, deadline=None)
settings.load_profile("ranks")


class RunOnRanks:
    """The `ranks` fixture: `ranks(size, body, **kwargs)` runs a function on real processes."""

    def __init__(self, processes: RankPool | LaunchedRanks) -> None:
        self._processes = processes

    def max_size_on(self, device: str) -> int:
        """Return the most ranks that can run there."""
        if device == devices.NCCL:
            return min(self._processes.max_size, torch.cuda.device_count())
        return self._processes.max_size

    def __call__(
        self,
        size: int,
        body: Callable[..., Any],
        /,
        *,
        device: str = devices.CPU,
        dedicated: bool = False,
        seconds: float = PATIENCE_SECONDS,
        **kwargs: Any,
    ) -> list[Any]:
        """Return what `body(context, **kwargs)` returned on each of `size` ranks.

        body: a function at module level; its first argument is a RankContext.
        device: where the ranks run, one of tests.ranks.devices. Skips the test where these are too
            few for so many ranks.
        dedicated: run in new processes and return an Outcome for each: for bodies that die or
            leave.
        seconds: how long it may take; then every rank's stack is printed and the call fails.
        """
        if device == devices.NCCL and size > torch.cuda.device_count():
            found = torch.cuda.device_count()
            pytest.skip(f"needs {size} CUDA devices for {size} ranks over NCCL, found {found}")
        run = self._processes.run_fresh if dedicated else self._processes.run
        return run(size, body, kwargs, device=device, seconds=seconds)

    def waiting(
        self,
        size: int,
        body: Callable[..., Any],
        among: Sequence[dict[str, Any]],
        /,
        *,
        device: str,
        **kwargs: Any,
    ) -> list[Outcome]:
        """As with dedicated=True, for a body that waits in most of its time. Cases of one test then
        wait at the same time, on the CPU, where they are processes of their own.

        among: the kwargs of every case that the test has there.
        """
        if device != devices.CPU:
            return self(size, body, device=device, dedicated=True, **kwargs)
        return self._processes.run_waiting(size, body, kwargs, among)


_TRUE_STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-case", action="store_true", help="on GPUs, too, run each test with all its cases"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--every-case"):
        return
    seen_on_nccl: set[str] = set()
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (left_out if is_left_out(item, seen_on_nccl) else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "few_on_gpus: see tests.gpu_cases")
    problem = world_size_problem(os.environ)
    if problem is not None:
        raise pytest.UsageError(problem)
    if is_launched(os.environ):
        take_share_of_gpu(os.environ)
    config.stash[_TRUE_STDERR] = os.dup(2)  # pytest captures only later


@pytest.fixture(scope="session")
def rank_processes(pytestconfig: pytest.Config) -> Iterator[RankPool | LaunchedRanks]:
    start_server()
    processes: RankPool | LaunchedRanks
    if is_launched(os.environ):
        processes = LaunchedRanks(pytestconfig.stash[_TRUE_STDERR])
    else:
        processes = RankPool()
    yield processes
    processes.close()


@pytest.fixture(autouse=True)
def _spare_the_collector(request: pytest.FixtureRequest) -> None:
    if request.session.testsfailed == 0:  # what a failed test leaves must be collected
        spare_the_collector()


@pytest.fixture
def ranks(rank_processes: RankPool | LaunchedRanks) -> Iterator[RunOnRanks]:
    """Run functions on real processes; see RunOnRanks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the oracle must not keep the cores from the ranks
    yield RunOnRanks(rank_processes)
    torch.set_num_threads(threads)
