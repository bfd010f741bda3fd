"""How does a compiled graph find its communication? Ops take no objects, so by a name.

The name says what the communication is, and which of its kind in the process: a graph that was
saved finds the same one in another process that has made the same, and never one of another kind.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from moe_ep.errors import MoEEpStateError

if TYPE_CHECKING:
    from moe_ep.rounds import Rounds

_MADE: Counter[str] = Counter()
_NAMED: WeakValueDictionary[str, Rounds] = WeakValueDictionary()


def name(communication: Rounds) -> str:
    """Give a new communication the name by which graphs find it."""
    who, params = communication, communication.params
    kind = f"rank {who.ep_rank} of {who.ep_size} with {params}"
    _MADE[kind] += 1
    graph_name = f"communication {_MADE[kind]} of {kind}"
    _NAMED[graph_name] = communication
    return graph_name


def find(graph_name: str) -> Rounds:
    """Return the communication. Raises MoEEpStateError where it is no more, or not yet."""
    communication = _NAMED.get(graph_name)
    if communication is None:
        raise MoEEpStateError(
            f"a graph needs {graph_name}, which is not in this process. Keep a communication as "
            "long as the graphs that were compiled with it. Before an exported program runs in "
            "another process, create there what it was exported with: on each rank as many "
            "communications with these params, in the same order."
        )
    return communication
