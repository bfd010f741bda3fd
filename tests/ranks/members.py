"""A group of some ranks that these make alone, whatever groups they are in already.

A process group made by its members alone (`use_local_synchronization`) will not do: torch 2.11
names it by the number of groups that a process is in, which differs among the ranks of the pool,
and its members then wait for each other under different names.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class MembersComm:
    """Some ranks of a Gloo group, in an order of their own; a `moe_ep.collectives.CommBackend`."""

    def __init__(self, parent: dist.ProcessGroup, members: Sequence[int], tag: int) -> None:
        """tag: of its messages, apart from those of others between the same ranks."""
        self.parent, self.members, self.tag = parent, members, tag

    def get_rank(self) -> int:
        return self.members.index(dist.get_rank(self.parent))

    def get_size(self) -> int:
        return len(self.members)

    def allgather(self, obj: Any, /) -> list[Any]:
        content = torch.zeros(4096, dtype=torch.uint8)
        mine = pickle.dumps(obj)
        content[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        buffers = [content.clone() for _ in self.members]
        peers = [dist.get_global_rank(self.parent, rank) for rank in self.members]
        others = [i for i in range(self.get_size()) if i != self.get_rank()]
        work = [dist.isend(content, peers[i], self.parent, self.tag) for i in others]
        work += [dist.irecv(buffers[i], peers[i], self.parent, self.tag) for i in others]
        for one in work:
            assert one is not None
            one.wait()
        return [pickle.loads(buffer.numpy().tobytes()) for buffer in buffers]

    def barrier(self) -> None:
        self.allgather(None)
