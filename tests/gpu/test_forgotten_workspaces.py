"""May a workspace on a GPU be forgotten twice, and is it refused from then on?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ep import MoEEpStateError
from tests.backends import SHARED_GPUS, Backend, named, on_each
from tests.conftest import RunOnRanks
from tests.problems import Problem, expect, problem_of
from tests.ranks import RankContext

pytestmark = pytest.mark.multirank


def geometry_of(backend: Backend) -> Any:
    sizes = {"ep_size": 2, "num_experts": 4, "top_k": 2, "max_tokens_per_rank": 8}
    if not backend.one_sided:
        return backend.kernels.FifoGeometry(**sizes, num_slots=2, slot_bytes=64)
    return backend.kernels.Geometry(
        **sizes, dispatch_bytes_per_token=64, combine_bytes_per_token=64
    )


def forget_twice(context: RankContext, backend: str) -> list[Problem | None]:
    """Body: what is said to a check of a workspace that was forgotten, and then initialised."""
    kernels, geometry = named(backend).kernels, geometry_of(named(backend))
    # The peer takes no part: nothing is sent.
    segment_bytes = kernels.workspace_size_per_rank(geometry)
    workspace = torch.zeros(2, segment_bytes, dtype=torch.uint8, device=context.device)
    said = []
    for _ in range(2):
        for _ in range(2):
            kernels.forget(workspace, geometry, 0)
        said.append(problem_of(kernels.check, workspace, geometry, 0))
        for _ in range(2):
            kernels.initialize(workspace, geometry, 0)
        said.append(problem_of(kernels.check, workspace, geometry, 0))
    kernels.forget(workspace, geometry, 0)
    return said


@on_each(having="workspace", devices=SHARED_GPUS)
def test_a_workspace_can_be_forgotten_and_initialised_twice(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for said in ranks(1, forget_twice, device=device, backend=backend.name):
        for forgotten, initialised in zip(said[::2], said[1::2], strict=True):
            expect(forgotten, MoEEpStateError, ["was not initialised"])
            assert initialised is None
