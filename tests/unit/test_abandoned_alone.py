"""What becomes of an abandoned round where there is no peer to tell, or no way to tell one?"""

import pytest
import torch

import moe_ep
from moe_ep import BootstrapConfig, TorchDistAlltoAll
from tests.unit.test_communication import PARAMS, X, dispatch, play_round


class Untold(TorchDistAlltoAll):
    """A backend that cannot tell peers of an exception between dispatch and combine."""

    def _abandon(self):
        return False


def test_a_round_that_is_abandoned_without_a_word_to_peers_breaks_the_object(monkeypatch):
    comm = Untold(BootstrapConfig(1, 0, device="cpu"), PARAMS)
    monkeypatch.setattr(comm, "ep_size", 2)  # as if there were peers
    dispatch(comm)
    try:
        raise ArithmeticError("too much")
    except ArithmeticError:
        comm.abandon_round()
    match = "abandoned on this rank by ArithmeticError: too much, .*they wait in combine"
    with pytest.raises(moe_ep.MoEEpStateError, match=match):
        dispatch(comm)


def test_a_rank_alone_abandons_its_round_on_any_backend():
    comm = Untold(BootstrapConfig(1, 0, device="cpu"), PARAMS)
    comm.dispatch(X, torch.tensor([[0, 1], [4, 1], [2, 3]]))
    comm.abandon_round()
    play_round(comm)


def test_a_rank_alone_abandons_a_round_that_is_captured(monkeypatch):
    comm = TorchDistAlltoAll(BootstrapConfig(1, 0, device="cpu"), PARAMS)
    play_round(comm)  # in which the ranks agree on the sizes
    with monkeypatch.context() as patch:
        patch.setattr(comm, "_is_captured", lambda: True)
        dispatch(comm)
        comm.abandon_round()
    play_round(comm)
