"""How does compiled code read what a dispatch has left, without a copy?

A graph of torch.compile has no views of a workspace: the ops `dispatch` and `received_rows` return
new tensors. When Inductor turns the graph into calls, all that is made of such a tensor is known.
Where it goes into the combine of the round and nowhere else, the code gets a view in the tensor's
place, as eager code does: what reads it then comes before combine, whose input it makes, in any
order that Inductor may choose. Everything else stays a copy, since from combine on the workspace is
the peers'. `moe_ep/done_with.py` says how that is told.

There is no public way to do so. An Inductor that lacks what this needs goes on making copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from moe_ep import _native
from moe_ep.done_with import goes_into

Lowering = Callable[..., Any]


@functools.cache
def teach_inductor(*backends: str) -> None:
    """Let Inductor read in place what backends have received.

    backends: what the names of their ops begin with.
    """
    try:
        for backend in backends:
            _teach(backend)
    except Exception:  # of whatever kind: its inside is not ours, and it goes on as it is
        return


def _teach(backend: str) -> None:
    combines = [_op(backend, name) for name in ("combine", "combine_out", "combine_quantized")]
    rows, in_place = _op(backend, "received_rows"), _op(backend, "dispatch_in_place")
    has_views = functools.partial(_may_be_views, combines=combines, reads=[rows])
    _replace(_op(backend, "dispatch"), functools.partial(_dispatch, in_place, has_views))
    _replace(rows, functools.partial(_received_rows, has_views))


def _replace(op: Any, by: Callable[[Lowering], Lowering]) -> None:
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    # As Inductor does with an op that it meets for the first time, but for the last line.
    constraint = tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
    make_fallback(op, layout_constraint=constraint)  # type: ignore[no-untyped-call]
    lowerings[op] = by(lowerings[op])


def _op(backend: str, name: str) -> Any:
    return getattr(torch.ops.moe_ep, f"{backend}_{name}").default


def _may_be_views(combines: list[Any], reads: list[Any]) -> bool:
    """Whether the node that Inductor is at may return views of the workspace."""
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    if getattr(graph, "cpp_wrapper", True) or hasattr(graph, "parent"):
        return False  # a program that leaves the process, or a graph within another
    return goes_into(graph.current_node, combines, reads)


def _dispatch(in_place: Any, has_views: Callable[[], bool], copies: Lowering) -> Lowering:
    def lower(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        graph: Any = V.graph
        if len(args) < 10 or not has_views():
            return copies(*args, **kwargs)
        workspace, _, topk_weights, _, stats, _, geometry, ep_rank, _, tokens_per_rank = args[:10]
        used = {got.args[1] for got in graph.current_node.users if got.users}
        is_there = (True, topk_weights is not None, True, stats is not None)
        if not all(is_there[index] for index in used):
            return copies(*args, **kwargs)
        _call(in_place, *args, **kwargs)
        view = torch.ops.moe_ep.received_routing_view.default
        where = (workspace, geometry, ep_rank, tokens_per_rank)
        return tuple(_view(view, *where, i) if i in used else None for i in range(len(is_there)))

    return lower


def _received_rows(has_views: Callable[[], bool], copy: Lowering) -> Lowering:
    def lower(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 7 or not has_views():
            return copy(*args, **kwargs)
        row_bytes, index = args[4:6]
        if not _is_dense(row_bytes[index]):
            return copy(*args, **kwargs)  # a graph takes its tensors for dense ones
        return _view(torch.ops.moe_ep.received_rows_view.default, *args, **kwargs)

    return lower


def _is_dense(row_bytes: Any) -> bool:
    return isinstance(row_bytes, int) and row_bytes == _native.row_pitch(row_bytes)


def _view(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what the op returns, which is a view of the workspace."""
    from torch._inductor.virtualized import V

    made = _call(op, *args, **kwargs)
    # What an op returns may lie anywhere, for Inductor; this begins where a region does.
    V.graph.unaligned_buffers.discard(made.get_name())
    return made


def _call(op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor.lowering import fallback_handler

    lower: Lowering = fallback_handler(op, add_to_fallback_set=False)  # type: ignore[no-untyped-call]
    return lower(*args, **kwargs)
