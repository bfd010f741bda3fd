"""Do compiled graphs hold a part of a workspace? What they do not hold they cannot clone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from moe_ep import MoEEpCommunication


class WatchedGraphs:
    """A compiler that runs the graphs of forward and backward as AOTAutograd made them, which are
    those that Inductor gets, and looks at the memory of all that goes in and out.

    runs: how often a graph has run.
    parts: tensors in a workspace that were a graph's constant, input or output.
    """

    def __init__(self, communications: Iterable[MoEEpCommunication]) -> None:
        memories = [comm._shared.memory for comm in communications]
        self._workspaces = {_storage(m.workspace) for m in memories if m is not None}
        self.runs = 0
        self.parts = 0

    @property
    def backend(self) -> Callable[..., Any]:
        """What torch.compile takes as its backend."""
        made: Callable[..., Any] = aot_autograd(  # type: ignore[no-untyped-call]
            fw_compiler=self._watched, partition_fn=min_cut_rematerialization_partition
        )
        return made

    def _watched(self, graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        constants = [
            getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"
        ]

        def run(*inputs: Any) -> Any:
            self.runs += 1
            self._count(*constants, *inputs)
            outputs = graph(*inputs)
            self._count(*outputs)
            return outputs

        boxed: Callable[..., Any] = make_boxed_func(run)
        return boxed

    def _count(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, Tensor) and _storage(value) in self._workspaces:
                self.parts += 1


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
