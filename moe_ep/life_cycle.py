"""What becomes of a communication besides its rounds? Beginning anew, giving its memory back and
having it again, and its end.
"""

from __future__ import annotations

import abc
import contextlib
import os
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar, Final, NoReturn

import torch
from typing_extensions import Self

from moe_ep import workspace_memory
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.collectives import CommBackend, SingleRankComm, as_comm_backend, group_behind
from moe_ep.config import CommunicationConfig
from moe_ep.errors import MoEEpStateError
from moe_ep.streams import on_stream_of
from moe_ep.workspace_sharing import move
from moe_ep.workspaces import Workspace


class LifeCycle(abc.ABC):
    """A communication as its workspace knows it. What plays rounds is `moe_ep.rounds`."""

    backend_name: ClassVar[str]
    """Set by `register_communication`."""

    def __init__(
        self, bootstrap: BootstrapConfig, config: CommunicationConfig, comm: CommBackend
    ) -> None:
        """Begin with a workspace without memory.

        comm: what the group agrees over.
        """
        self.config: Final = config
        self.device: Final[torch.device] = bootstrap.torch_device
        self.ep_rank: Final[int] = bootstrap.rank
        self.ep_size: Final[int] = bootstrap.world_size
        # The group is the workspace's business, and not held beyond destroy.
        self._bootstrap: Final = replace(bootstrap, process_group=None, tcp_store=None)
        self._who: Final = f"backend {self.backend_name}, rank {self.ep_rank}"
        self._destroyed: bool = False
        self._in_round: bool = False  # where others share the workspace: whose turn it is
        # A setting of the backends that take masks.
        self._rank_mask_enabled: Final[bool] = getattr(config, "enable_rank_mask", False)
        self._process: Final[int] = os.getpid()
        self._enter(Workspace(comm, self.ep_rank, self.ep_size))

    def _enter(self, workspace: Workspace) -> None:
        """Take part in a workspace, and leave that of before."""
        self._shared = workspace
        workspace.admit(self)

    @property
    def _comm(self) -> CommBackend:
        """What the group agrees over."""
        return self._shared.comm

    def _comm_over(self, comm_backend: Any) -> CommBackend:
        """Return what a user's comm_backend agrees over; None: the group."""
        if comm_backend is None:
            return self._comm
        return as_comm_backend(comm_backend, timeout_sec=self.config.timeout_sec)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of memory that this rank holds for the object between rounds.

        Objects that share a workspace each report the whole of it. 0 after destroy, while the
        memory is released, and in a forked process; 0 always where a backend holds none.
        """
        return self._shared.mapped_bytes if os.getpid() == self._process else 0

    def reinitialize(self, comm_backend: Any = None) -> None:
        """Begin anew in the same memory: no round is open, none has failed, no rank is behind.

        For a rank that was masked off and comes back, and after a failure: a time-out, Ctrl-C, a
        call that raised on some ranks only. Collective over the ranks that go on, for all objects
        that share the workspace; a round that is open is dropped. Waits for the device. The
        contents are lost; addresses stay, and captured CUDA graphs can be replayed.

        comm_backend: as in the config, but of any ranks of the group, in any order, where
            enable_rank_mask is set; else of all. None: the group of the communication.

        Ranks that it leaves out must stay outside active_rank_mask until a later call has them in.
        They must be dead, or outside of dispatch and combine for good: one that is still in a round
        may write into the memory of the others, or sum rows that they have written anew. A process
        that has taken the place of a dead one has no part in this memory: create the communication
        anew on all ranks.

        Raises on all ranks together, with nothing changed: MoEEpConfigError where ranks are missing
        or there twice, MoEEpStateError while the memory is released, where a checkpoint has lost
        it, and of torch_dist, which has none. MoEEpTimeoutError where a rank of comm_backend does
        not come: the object is then broken, and the call can be made again.
        Raises TypeError for another kind of comm_backend, and MoEEpStateError after destroy, in a
        forked process and while a CUDA graph is being captured, on the rank alone.
        """
        self._require_present("reinitialize")
        self._refuse_capture("reinitialize")
        comm = self._comm_over(comm_backend)
        with self._on_stream():
            workspace_memory.reinitialize(
                self._shared, comm, self._wait_for_device, in_part=self._rank_mask_enabled
            )

    def checkpoint_prepare(self) -> None:
        """Give the memory back and keep its addresses, for all objects that share the workspace.

        Collective over all ranks, masked ones too, between rounds; idempotent, also through another
        object of the workspace. Waits for the device. The contents are lost.

        Until `checkpoint_restore`, dispatch, combine, get_combine_input_buffer and check raise
        MoEEpStateError, workspace_bytes is 0, and captured CUDA graphs must not be replayed. Views
        of library memory (what dispatch returned, combine input buffers) must not be touched: on
        the CPU a read of one ends the process with SIGSEGV, on CUDA it is a fault of the device.
        destroy stays legal. torch_dist has no memory: there only the state of the object changes.

        Raises on all ranks together, with nothing released: MoEEpStateError in an open round (call
        combine first) or on a broken object; what the device has recorded, as `check` does.
        Raises on all ranks together, if a rank fails after that: MoEEpPlatformError. The workspace
        is then broken, and the ranks must restart.
        Raises MoEEpStateError after destroy, in a forked process and while a CUDA graph is being
        captured, on the rank alone.
        """
        self._require_present("checkpoint_prepare")
        self._refuse_capture("checkpoint_prepare")
        self._close_left_open()
        with self._on_stream():
            workspace_memory.prepare(self._shared, self.check)

    def checkpoint_restore(self, comm_backend: Any = None) -> None:
        """Put new memory behind the addresses that checkpoint_prepare has kept, and start anew.

        Collective over the group that is given; idempotent: where the memory is there, only the
        group changes. Rounds are exact again, at the same addresses, and CUDA graphs captured
        before the release can be replayed. All objects that share the workspace go on, over the
        new group.

        comm_backend: as in the config, the same ranks in the same order; None: the group of before,
            which must still be there. Objects that are created later share the workspace if they
            name this group. torch_dist only agrees over it: its tokens travel over the process
            group of the bootstrap.

        Raises on all ranks together, and can be called again then: MoEEpConfigError where rank or
        size are not those of before, MoEEpStateError in an open round, on a broken object, or where
        some ranks have not released; MoEEpPlatformError where the memory cannot be had any more.
        Raises on all ranks together, if a rank fails after that: MoEEpPlatformError. The workspace
        is then broken, and the ranks must restart.
        Raises TypeError for another kind of comm_backend, and MoEEpStateError after destroy, in a
        forked process and while a CUDA graph is being captured, on the rank alone.
        """
        self._require_present("checkpoint_restore")
        self._refuse_capture("checkpoint_restore")
        comm = self._comm_over(comm_backend)
        group = self._shared.group if comm_backend is None else group_behind(comm)
        with self._on_stream():
            workspace_memory.restore(self._shared, comm)
        move(self._shared, group)

    def destroy(self) -> None:
        """Free what the object holds, and let go of its group; a shared workspace goes with the
        last object. Idempotent.

        All ranks should call it, but it waits for nobody: memory that peers share is free when the
        last of them has let go of it. Also legal on a broken object, while the memory is released,
        and in the middle of a round, which breaks the objects that share the workspace.
        """
        if self._destroyed:
            return
        shared, self._destroyed = self._shared, True
        # What is left of the object holds no memory and no group.
        self._shared = Workspace(SingleRankComm(), self.ep_rank, self.ep_size)
        try:
            self._destroy()
        finally:
            with self._on_stream():
                shared.leave(self, in_round=self._in_round)

    def __enter__(self) -> Self:
        self._require_alive("__enter__")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.destroy()

    def __reduce__(self) -> NoReturn:
        # What copy, deepcopy and pickle all ask.
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it owns memory and has a place in "
            "its group's rounds. Use the object itself, or create another one on all ranks."
        )

    @abc.abstractmethod
    def check(self) -> None:
        """Wait for the device and raise what it recorded."""

    @abc.abstractmethod
    def _drop_round(self) -> None:
        """Forget a round that is open: the workspace begins anew."""

    @abc.abstractmethod
    def _close_left_open(self) -> None:
        """Close a round that a backward has left open. Collective where there is one."""

    def _destroy(self) -> None:  # noqa: B027  (or nothing to free)
        """Free everything. Called once. Waits for nobody: peers may be dead or in a round."""

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which a backend works."""
        return on_stream_of(self._bootstrap)

    def _wait_for_device(self) -> None:
        """Wait for what was queued, whatever becomes of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _require_alive(self, call: str) -> None:
        self._require_present(call)
        self._shared.require_whole(call, self._who)

    def _refuse_capture(self, call: str) -> None:
        """Raise where the current stream of the device is being captured: the host must wait."""
        if self.device.type != "cuda":
            return
        with torch.cuda.device(self.device), self._on_stream():
            if not torch.cuda.is_current_stream_capturing():
                return
        raise MoEEpStateError(
            f"{call} while a CUDA graph is being captured ({self._who}): call it after the capture."
        )

    def _require_present(self, call: str) -> None:
        """Raise unless the object is this process's and is not destroyed."""
        if self._destroyed:
            raise MoEEpStateError(
                f"{call} after destroy ({self._who}): create a new communication."
            )
        if not torch.compiler.is_compiling() and os.getpid() != self._process:
            raise MoEEpStateError(
                f"{call} in a process forked from rank {self.ep_rank} (backend "
                f"{self.backend_name}), whose communication this is: create one of its own."
            )
