"""Is a graph of layers that take turns in one workspace right, also after a checkpoint?"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from moe_ep import MoEEpCommParams, create_communication
from tests.compile.test_op_form import CAPACITY, EXPERTS, HIDDEN, TOP_K, elementwise, inputs
from tests.conftest import RunOnRanks
from tests.ranks import RankContext


def compiled_in_turns(context: RankContext) -> int:
    """Body: return how many graphs were compiled."""
    params = MoEEpCommParams(EXPERTS, TOP_K, CAPACITY, HIDDEN, dtype=torch.float32)
    torch._dynamo.reset()
    counters.clear()
    layers = [
        create_communication(context.bootstrap(), params, "cake", timeout_sec=100) for _ in range(2)
    ]

    def model(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        for layer in (*layers, *layers):
            x = (x + layer.combine(elementwise(layer, layer.dispatch(x, ids, weights)))) % 64
        return x

    compiled = torch.compile(model, fullgraph=True)
    given = inputs(context.rank, 5)
    for _ in range(3):
        assert torch.equal(compiled(*given), model(*given))
        layers[0].checkpoint_prepare()
        layers[1].checkpoint_restore()
    for layer in layers:
        layer.destroy()
    return counters["stats"]["unique_graphs"]


def test_layers_that_share_a_workspace_compile_into_one_graph(ranks: RunOnRanks) -> None:
    assert ranks(2, compiled_in_turns) == [1, 1]
