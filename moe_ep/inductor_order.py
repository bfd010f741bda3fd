"""How does Inductor keep the rounds of a graph in order?

The ops of `moe_ep.round_ops` are ordered effects, and down to Inductor's own graph their order
stands in tokens. From there on Inductor notes it under the names of buffers where its scheduler
looks for those of operations (torch 2.11 to 2.14 at least), and a round that no data ties to the
one before may move in front of it. So the order is noted here, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
        previous = getattr(graph, _PREVIOUS, None)
        for operation in graph.operations[already:]:
            if previous is not None:
                graph.additional_star_deps[operation.get_operation_name()].add(previous)
        setattr(graph, _PREVIOUS, graph.operations[-1].get_name())
        return lowered

    return lower_in_order
