"""Which settings does every backend have?"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from moe_ep.collectives import as_comm_backend
from moe_ep.errors import MoEEpConfigError
from moe_ep.limits import DEFAULT_TIMEOUT_SEC, MAX_TIMEOUT_SEC
from moe_ep.params import MoEEpCommParams


@dataclass(frozen=True, kw_only=True)
class CommunicationConfig:
    """Settings of a backend. A backend's own config derives from this and sets `backend_name`.

    comm_backend: what the group agrees over (`get_rank`, `get_size`, `allgather`, `barrier`; a
        torch.distributed ProcessGroup and an mpi4py communicator are accepted); None:
        torch.distributed over the bootstrap's group. Its size and rank must be the bootstrap's.
    timeout_sec: 1..86400, the seconds of wall clock that one call waits for a peer.
    arena: the params of all layers of the group that take turns in one workspace, those of this
        communication among them, in any order. Communications that are created with the same arena
        share that workspace, whatever their sizes; it is about as large as that of the largest, and
        does not grow. (): only those whose sizes are the same share one.

    Fields declared with `field(compare=False)` may differ between the ranks of a group; the others
    must not.
    """

    backend_name: ClassVar[str]

    comm_backend: Any = field(default=None, compare=False)
    timeout_sec: int = field(default=DEFAULT_TIMEOUT_SEC, compare=False)
    arena: tuple[MoEEpCommParams, ...] = ()

    def __post_init__(self) -> None:
        require_int_in_range("timeout_sec", self.timeout_sec, 1, MAX_TIMEOUT_SEC)
        if self.comm_backend is not None:
            as_comm_backend(self.comm_backend)
        if not isinstance(self.arena, tuple) or not all(
            isinstance(layer, MoEEpCommParams) for layer in self.arena
        ):
            raise TypeError(f"arena must be a tuple of MoEEpCommParams, got {self.arena!r}.")

    def layers_with(self, params: MoEEpCommParams) -> tuple[MoEEpCommParams, ...]:
        """Return the layers that a workspace for `params` must have room for.

        Raises MoEEpConfigError where there is an arena that does not name them.
        """
        if self.arena and params not in self.arena:
            raise MoEEpConfigError(
                f"arena must name the params of each communication that is created with it, got "
                f"{params}, which is not in {self.arena}. Add it on all of them."
            )
        return self.arena or (params,)

    def group_wide_settings(self) -> dict[str, object]:
        """Return the settings that must be equal on every rank of the group."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.compare}


def require_int_in_range(name: str, value: object, low: int, high: int) -> None:
    """Raise TypeError unless `value` is an int, MoEEpConfigError unless `low <= value <= high`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__}).")
    if not low <= value <= high:
        raise MoEEpConfigError(f"{name} must be {low}..{high}, got {value}.")
