"""What may be done with a workspace now? The state of its rounds, and of the memory under them."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakSet

from torch import Tensor

from moe_ep.collectives import CommBackend, agree, attempt
from moe_ep.errors import MoEEpStateError
from moe_ep.symmetric_memory import SymmetricMemory

if TYPE_CHECKING:
    from moe_ep.backward_round import RoutedRound

# States: idle -> dispatched -> idle -> ..., in a backward idle -> in_backward -> idle, and
# idle -> released -> idle; broken is final. Strings, which dynamo can guard on.
IDLE: Final = "idle"
DISPATCHED: Final = "dispatched"
IN_BACKWARD: Final = "in_backward"
RELEASED: Final = "released"
BROKEN: Final = "broken"

# Of a call that was begun, and what broke it did not say why.
INTERRUPTED: Final = "a call did not finish: it was interrupted, or runs in another thread."
# What users call, for messages.
PREPARE: Final = "checkpoint_prepare"
RESTORE: Final = "checkpoint_restore"
REINITIALIZE: Final = "reinitialize"
_RECREATE = "destroy it and re-create it on all ranks"


class Member(Protocol):
    """A communication, as its workspace knows it."""

    def _drop_round(self) -> None: ...


class Workspace:
    """The state of the rounds of one communication or of several that take turns, and the memory
    that they work in, where the backend has any.

    state: of all of them; the compiled path reads and writes it, hence a plain attribute.
    ep_rank, ep_size: this rank's place in its group.
    members: the communications; weak, since one may be dropped without destroy, and then does not
        count.
    broken_by, remedy: once it is broken, why, and what to do.
    backward: the round that is open in a backward, in that state.
    """

    def __init__(
        self,
        comm: CommBackend,
        ep_rank: int,
        ep_size: int,
        memory: SymmetricMemory | None = None,
        *,
        initialize: Callable[[], None] | None = None,
        forget: Callable[[], None] | None = None,
        say_farewell: Callable[[], None] | None = None,
    ) -> None:
        """Begin with idle.

        comm: what the ranks agree over.
        ep_rank, ep_size: this rank's place in it. (It may be gone when it could be asked.)
        memory: mapped, not initialised yet.
        initialize: prepares this rank's own memory; the ranks meet after it.
        forget: is called before the memory goes.
        say_farewell: tells peers that wait for this rank that it comes to no further round; called
            with memory. None of the three may hold a communication.
        """
        self.comm = comm
        self.ep_rank = ep_rank
        self.ep_size = ep_size
        self.memory = memory
        self.state: str = IDLE
        self.broken_by: str = INTERRUPTED
        self.remedy: str = _RECREATE
        if memory is not None:
            self.remedy = f"call {REINITIALIZE} on all ranks that go on, or {_RECREATE}"
        self.backward: RoutedRound | None = None
        self._initialize = initialize
        self._forget = forget
        self._say_farewell = say_farewell
        self._process = os.getpid()
        self.members: WeakSet[Member] = WeakSet()
        # What it is found by, see moe_ep.workspace_sharing.
        self.name = ""
        self.group: object = None
        self.layout: Hashable = None

    @property
    def mapped_bytes(self) -> int:
        """Bytes of this rank's own memory, 0 while there is none."""
        mapped = self.memory is not None and self.memory.state == "mapped"
        return self.memory.mapped_bytes if mapped and self.memory is not None else 0

    @property
    def tensor(self) -> Tensor:
        """The memory, see SymmetricMemory.workspace."""
        assert self.memory is not None  # asked for by a backend that has some
        return self.memory.workspace

    def admit(self, member: Member) -> None:
        """Count a communication in."""
        self.members.add(member)

    def leave(self, member: Member, *, in_round: bool) -> None:
        """Count a communication out. The last one lets go of the memory. Waits for no peer.

        One that leaves in the middle of its round takes the others' turn with it: the peers are in
        that round, and only its combine could end it.
        """
        self.members.discard(member)
        try:
            if self.state in (DISPATCHED, IN_BACKWARD) and in_round:
                self._leave_round()
        finally:
            if not self.members:
                self.close()

    def _leave_round(self) -> None:
        where = "between dispatch and combine"
        if self.state == IN_BACKWARD:
            where = "when a backward had not come to its dispatch and so left a round open"
        try:
            self._tell_peers()
        finally:
            self.break_down(f"a communication that shared its workspace was destroyed {where}.")

    def close(self) -> None:
        """Let go of the memory. Views keep theirs."""
        try:
            self._tell_peers()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        forget, memory = self._forget, self.memory
        self._initialize = self._forget = self._say_farewell = None
        self.break_down("it was destroyed.")
        try:
            if forget is not None:
                forget()
        finally:
            if memory is not None:
                memory.close()

    def _tell_peers(self) -> None:
        # A forked child has a mapping of its parent's memory, and nothing to say there.
        mine = os.getpid() == self._process
        if self._say_farewell is not None and mine and self.mapped_bytes > 0:
            self._say_farewell()

    def require(self, state: str, call: str, *, in_round: bool, who: str) -> None:
        """Raise MoEEpStateError unless a communication may make the call.

        state: idle or dispatched. in_round: whether an open round is its own. who: it, for the
            message.
        """
        self.require_whole(call, who)
        self.require_memory(call, who)
        foreign = self.state == DISPATCHED and not in_round
        if self.state == state and not foreign:
            return
        if foreign and state == IDLE:
            problem = (
                f"{call} while a round is open on another communication of the same group and "
                "layout, which shares the workspace: call its combine first, or create the two "
                "over a process group or comm_backend each. If that one was dropped, destroy and "
                "re-create those that share it"
            )
        elif state == IDLE:
            problem = (
                f"{call} while a round is open: call combine first. Where an exception has come "
                "between, abandon_round in its place tells the peers"
            )
        else:
            problem = f"{call} without an open round: call dispatch first"
        raise MoEEpStateError(f"{problem} ({who}).")

    def require_whole(self, call: str, who: str) -> None:
        """Raise MoEEpStateError if it is broken."""
        if self.state == BROKEN:
            raise MoEEpStateError(
                f"{call} on a broken communication ({who}): {self.remedy}. It broke because: "
                f"{self.broken_by}"
            )

    def require_memory(self, call: str, who: str) -> None:
        """Raise MoEEpStateError while the memory is released."""
        if self.state == RELEASED:
            raise MoEEpStateError(
                f"{call} while the memory is released ({who}): call {RESTORE} on all ranks first."
            )

    def initialize(self, comm: CommBackend) -> None:
        """Prepare the memory on all ranks. Collective: no rank may signal before all are ready."""
        outcome = attempt(self._initialize or (lambda: None))
        agree(comm, outcome, what="initialising the workspace")

    def break_down(self, reason: str) -> None:
        """Let no call but reinitialize and destroy go on from here."""
        self.state, self.broken_by = BROKEN, reason
