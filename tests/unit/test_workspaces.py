"""Does a workspace let go of its memory, whatever goes wrong on the way?"""

from __future__ import annotations

import pytest
import torch

from moe_ep.collectives import SingleRankComm
from moe_ep.symmetric_memory import SymmetricMemory
from moe_ep.workspaces import Workspace


def test_the_memory_goes_where_the_peers_cannot_be_told() -> None:
    memory = SymmetricMemory.allocate(SingleRankComm(), 100, torch.device("cpu"))
    forgotten = []

    def fail() -> None:
        raise RuntimeError("the device is lost")

    workspace = Workspace(
        SingleRankComm(), 0, 1, memory, forget=lambda: forgotten.append(1), say_farewell=fail
    )
    with pytest.raises(RuntimeError, match="the device is lost"):
        workspace.close()
    assert forgotten == [1]
    assert memory.state == "closed"
    assert workspace.mapped_bytes == 0
    workspace.close()  # says no second farewell
