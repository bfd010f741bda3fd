"""What becomes of a tensor in a graph: does all of it go into the next combine?"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node


def goes_into(made: Node, combines: Sequence[Any], reads: Sequence[Any]) -> bool:
    """Whether all that is made of what the node returns is input of the next op on its workspace,
    which is one of `combines`, or is made into such input.

    Then all of that is computed before this op, whatever order a compiler finds. Where something is
    returned, used behind the op, or leads nowhere, the answer is False, and so it is where an op
    writes to any tensor. An op is followed whether or not what it returns may be a view: one that a
    compiler fuses reads its inputs where its last user is.

    made: a call whose first argument is the workspace.
    reads: ops that leave the workspace as it is, and are passed over.
    """
    workspace = made.args[0] if made.args else None
    if not isinstance(workspace, Node) or workspace.op != "placeholder":
        return False  # a clone, say, which the op will refuse
    place = {node: index for index, node in enumerate(made.graph.nodes)}
    behind = [user for user in workspace.users if place[user] > place[made]]
    ends = [user for user in behind if user.target not in reads]
    end = min(ends, key=place.__getitem__, default=None)
    if end is None or end.target not in combines:
        return False
    followed, left = {made}, [made]
    while left:
        node = left.pop()
        users = [user for user in node.users if not _is_unused_item(user)]
        if not users and node is not made:
            return False
        for user in users:
            if user is end or user in followed:
                continue
            if place[user] > place[end] or not _only_reads(user):
                return False
            followed.add(user)
            left.append(user)
    return True


def _is_unused_item(node: Node) -> bool:
    return node.target is operator.getitem and not node.users


def _only_reads(node: Node) -> bool:
    op = node.target
    return op is operator.getitem or (
        isinstance(op, torch._ops.OpOverload) and not op._schema.is_mutable
    )
