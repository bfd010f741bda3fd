"""Does torch.compile(mode="reduce-overhead") capture layers whole, with nothing cloned?

What Inductor cannot capture it runs as it is, and counts as a skip. A clone of a workspace makes an
op raise, so a round that ends is one without clones.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from moe_ep import MoEEpCommParams, MoEEpCommunication, create_communication
from tests.backends import SHARED_GPUS, Backend, on_each
from tests.conftest import RunOnRanks
from tests.ranks import RankContext

pytestmark = pytest.mark.multirank
HIDDEN, EXPERTS, TOP_K, CAPACITY, TOKENS = 64, 8, 2, 16, 9
PARAMS = MoEEpCommParams(EXPERTS, TOP_K, CAPACITY, HIDDEN, dtype=torch.float32)
CALLS = 5  # Inductor warms up, captures, and replays from the third on.
SKIPPED = "cudagraph_skips"


class Model(nn.Module):
    """Small integers all the way, so that sums are exact whatever Inductor fuses.

    keeps: what a layer has received is used after its combine, too, where compiled code copies it.
    """

    def __init__(self, layers: Sequence[MoEEpCommunication], keeps: bool) -> None:
        super().__init__()
        self.layers = list(layers)
        self.keeps = keeps
        self.scale = nn.Parameter(torch.tensor(2.0, device=layers[0].device))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        for layer in self.layers:
            result = layer.dispatch(x, ids, weights)
            first, end = layer.first_local_expert, layer.first_local_expert
            end += layer.num_local_experts
            owned = ((result.topk_ids >= first) & (result.topk_ids < end)).any(1, keepdim=True)
            rows = torch.where(owned, result.hidden_states, 0)
            x = (x + layer.combine(rows * self.scale)) % 64
            if self.keeps:
                x = (x + rows.sum(0)) % 64
        return x


def inputs(rank: int, call: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * rank + call)
    x = torch.randint(0, 64, (TOKENS, HIDDEN), generator=random).float()
    ids = torch.rand(TOKENS, EXPERTS, generator=random).topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K, generator=random)
    return x.to(device), ids.to(device), weights.to(device)


def captured_by_inductor(
    context: RankContext, backend: str, layers: int, trains: bool, keeps: bool = False
) -> dict[str, int]:
    """Body: return what Inductor counted, and how many graphs it holds."""
    from torch._inductor.cudagraph_trees import get_manager

    torch._dynamo.reset()
    counters.clear()
    comms = [
        create_communication(context.bootstrap(), PARAMS, backend, timeout_sec=100)
        for _ in range(layers)
    ]
    device = comms[0].device
    model = Model(comms, keeps)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    with torch.set_grad_enabled(trains):
        for call in range(CALLS):
            x, ids, weights = inputs(context.rank, call, device)
            want, got = (
                outcome(run, x.clone().requires_grad_(trains), ids, weights)
                for run in (model, compiled)
            )
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), f"call {call}"
    for comm in comms:
        comm.check()
    manager = get_manager(device.index, create_if_none_exists=False)
    held = 0 if manager is None else sum(len(nodes) for nodes in manager.roots.values())
    counted = {SKIPPED: counters["inductor"][SKIPPED], "held": held}
    torch._dynamo.reset()
    for comm in comms:
        comm.destroy()
    return counted


def outcome(run: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> list[Tensor]:
    """Copies: the next replay writes over what a captured graph returned."""
    y = run(x, ids, weights)
    if not y.requires_grad:
        return [y.clone()]
    y.sum().backward()
    assert x.grad is not None
    return [y.detach().clone(), x.grad.clone()]


@on_each(having="workspace", devices=SHARED_GPUS)
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_layers_are_captured_whole(
    ranks: RunOnRanks, backend: Backend, device: str, layers: int, trains: bool
) -> None:
    how = {"backend": backend.name, "layers": layers, "trains": trains}
    for counted in ranks(2, captured_by_inductor, device=device, **how):
        assert counted[SKIPPED] == 0, counted
        assert counted["held"] > 0, counted


@on_each(having="workspace", devices=SHARED_GPUS)
def test_layers_whose_rows_are_used_after_combine_are_captured_whole(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    how = {"backend": backend.name, "layers": 2, "trains": False, "keeps": True}
    for counted in ranks(2, captured_by_inductor, device=device, **how):
        assert counted[SKIPPED] == 0, counted
        assert counted["held"] > 0, counted
