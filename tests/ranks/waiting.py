"""How do fresh ranks wait for each other where they cannot talk, since one of them is to be silent,
or has failed?

Over the store that their parent holds, and by what the kernel says of a process. So no test needs
to guess how long another rank takes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.ranks.process import RankContext


def tell(what: str, value: str = "") -> None:
    """Let the other ranks know something."""
    _store().set(what, value)


def hear(what: str) -> str:
    """Return the value of what another rank tells, when it has."""
    return str(_store().get(what).decode())


def meet(where: str, count: int) -> None:
    """Return when so many ranks have come here."""
    store = _store()
    store.add(where, 1)
    while store.add(where, 0) < count:
        time.sleep(0.01)


def introduce(context: RankContext) -> None:
    """Tell the other ranks which process this one is."""
    tell(f"process of rank {context.rank}", str(os.getpid()))


def outlive(rank: int) -> None:
    """Return when the process of that rank, which introduces itself, has ended."""
    pid = int(hear(f"process of rank {rank}"))
    while is_running(pid):
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return whether the process has not ended."""
    return Path(f"/proc/{pid}/exe").exists()  # one that nobody has waited for has none


def _store() -> PrefixStore:
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore("tests", TCPStore(*where, is_master=False))
