"""Does a workspace let go of its memory, whatever goes wrong on the way?"""

from __future__ import annotations

import pytest
import torch

from moe_ep.collectives import SingleRankComm
from moe_ep.symmetric_memory import SymmetricMemory
from moe_ep.workspaces import BROKEN, DISPATCHED, Workspace


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


def test_one_that_leaves_in_its_round_takes_the_turn_along_where_the_peers_cannot_be_told() -> None:
    class Member:
        pass

    def fail() -> None:
        raise RuntimeError("the device is lost")

    memory = SymmetricMemory.allocate(SingleRankComm(), 100, torch.device("cpu"))
    workspace = Workspace(SingleRankComm(), 0, 1, memory, forget=lambda: None, say_farewell=fail)
    one, other = Member(), Member()
    workspace.admit(one)
    workspace.admit(other)
    workspace.state = DISPATCHED
    with pytest.raises(RuntimeError, match="the device is lost"):
        workspace.leave(one, in_round=True)
    assert workspace.state == BROKEN
    with pytest.raises(RuntimeError, match="the device is lost"):
        workspace.leave(other, in_round=False)
    assert memory.state == "closed"
