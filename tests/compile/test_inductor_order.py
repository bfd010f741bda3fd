"""Does an Inductor that does not keep rounds in order get an error, and not wrong sums?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ep import BootstrapConfig, MoEEpCommParams, create_communication, inductor_order
from tests.compile.test_gradients import side_by_side
from tests.problems import problem_of
from tests.rounds.layers import random_inputs, small_integers

PARAMS = MoEEpCommParams(4, 2, 9, 16, dtype=torch.float32)  # of no other test: no graph is cached


def test_rounds_that_inductor_would_reorder_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the order is noted in vain, which is what another version may bring."""

    def in_vain(*_: Any) -> None:
        """Inductor's own notes alone: the rounds side by side trade places."""

    monkeypatch.setattr(inductor_order, "_note", in_vain)
    torch._dynamo.reset()
    bootstrap = BootstrapConfig(1, 0, device="cpu")
    comms = [create_communication(bootstrap, PARAMS, "torch_dist") for _ in range(2)]
    compiled = torch.compile(side_by_side(comms), fullgraph=True)
    given = (*random_inputs(PARAMS, 5, small_integers, 0), torch.ones(16))
    with torch.no_grad():
        problem = problem_of(compiled, *given)
    for comm in comms:
        comm.destroy()
    torch._dynamo.reset()
    assert problem is not None, "nothing was raised"
    assert "has moved a round of dispatch and combine in front of the one before" in problem[1]
