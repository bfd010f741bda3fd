"""How does Inductor keep the rounds of a graph in order?

The ops of `moe_ep.round_ops` are ordered effects, and down to Inductor's own graph their order
stands in tokens. From there on Inductor notes it under the names of buffers where its scheduler
looks for those of operations (torch 2.11 to 2.14 at least), and a round that no data ties to the
one before may move in front of it. So the order is noted here, too.

There is no public way to do so. An Inductor that looks elsewhere for it must not go wrong silently:
when it writes the code of a round, the one before must have been written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from moe_ep.errors import MoEEpStateError

_PREVIOUS = "_moe_ep_previous_round_op"


@functools.cache
def teach_inductor(*ops: Any) -> None:
    """Let Inductor's scheduler run the ops in the order in which they stand in a graph."""
    from torch._inductor.lowering import register_lowering

    for op in ops:
        register_lowering(op, type_promotion_kind=None)(_in_order(op))


def _in_order(op: Any) -> Callable[..., Any]:
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    lower = fallback_handler(op, add_to_fallback_set=False)  # type: ignore[no-untyped-call]

    def lower_in_order(*args: Any, **kwargs: Any) -> Any:
        graph: Any = V.graph
        already = len(graph.operations)
        lowered = lower(*args, **kwargs)
        made = graph.operations[already:]  # of its inputs, the call, and of its outputs
        call = next(o for o in made if getattr(o, "op_overload", None) is op)
        previous = getattr(graph, _PREVIOUS, None)
        if previous is not None:
            for operation in made:
                _note(graph, operation, previous.last)
        setattr(graph, _PREVIOUS, _Written(call, made[-1].get_name(), previous))
        return lowered

    return lower_in_order


def _note(graph: Any, operation: Any, previous: str) -> None:
    """Tell the scheduler that an operation goes after a buffer was made."""
    graph.additional_star_deps[operation.get_operation_name()].add(previous)


class _Written:
    """Whether the code of a call has been written, after that of the one before.

    last: the last buffer that it makes.
    """

    def __init__(self, call: Any, last: str, previous: _Written | None) -> None:
        self.last = last
        self._is_written = False
        self._write = call.codegen
        self._previous = previous
        call.codegen = self._write_in_order

    def _write_in_order(self, wrapper: Any) -> None:
        if self._previous is not None and not self._previous._is_written:
            raise MoEEpStateError(
                f"Inductor of torch {torch.__version__} has moved a round of dispatch and combine "
                "in front of the one before, which this version of moe_ep cannot prevent. Compile "
                'with backend="aot_eager", or call the layers in a function under '
                "torch.compiler.disable."
            )
        self._is_written = True
        self._write(wrapper)
