"""What may be done with a workspace now? The state of its rounds, and of the memory under them.

Memory is given back between rounds and had again at the same addresses. What ranks do together for
that is gathered over the group, so that all go on or all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final, NoReturn, Protocol
from weakref import WeakSet

from torch import Tensor

from moe_ep.collectives import CommBackend, agree, attempt, by_rank
from moe_ep.errors import MoEEpConfigError, MoEEpError, MoEEpStateError
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

_INTERRUPTED = "a call did not finish: it was interrupted, or runs in another thread."
_PREPARE = "checkpoint_prepare"
_RESTORE = "checkpoint_restore"
_REINITIALIZE = "reinitialize"
_RECREATE = "destroy it and re-create it on all ranks"


class Member(Protocol):
    """A communication, as its workspace knows it."""

    def _drop_round(self) -> None: ...


class Workspace:
    """The state of the rounds of one communication or of several that take turns, and the memory
    that they work in, where the backend has any.

    state: of all of them; the compiled path reads and writes it, hence a plain attribute.
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
    ) -> None:
        """Begin with idle.

        comm: what the ranks agree over.
        ep_rank, ep_size: this rank's place in it. (It may be gone when it could be asked.)
        memory: mapped, not initialised yet.
        initialize: prepares this rank's own memory; the ranks meet after it.
        forget: is called before the memory goes. Neither of them may hold a communication.
        """
        self.comm = comm
        self._ep_rank = ep_rank
        self._ep_size = ep_size
        self.memory = memory
        self.state: str = IDLE
        self.broken_by: str = _INTERRUPTED
        self.remedy: str = _RECREATE
        if memory is not None:
            self.remedy = f"call {_REINITIALIZE} on all ranks that go on, or {_RECREATE}"
        self.backward: RoutedRound | None = None
        self._initialize = initialize
        self._forget = forget
        # Weak: a communication may be dropped without destroy, and then does not count.
        self._members: WeakSet[Member] = WeakSet()
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
        self._members.add(member)

    def leave(self, member: Member, *, in_round: bool) -> None:
        """Count a communication out. The last one lets go of the memory. Waits for no peer.

        One that leaves in the middle of its round takes the others' turn with it: the peers are in
        that round, and only its combine could end it.
        """
        self._members.discard(member)
        if self.state in (DISPATCHED, IN_BACKWARD) and in_round:
            where = "between dispatch and combine"
            if self.state == IN_BACKWARD:
                where = "when a backward had not come to its dispatch and so left a round open"
            self._break(f"a communication that shared its workspace was destroyed {where}.")
        if not self._members:
            self.close()

    def close(self) -> None:
        """Let go of the memory. Views keep theirs."""
        forget, memory = self._forget, self.memory
        self._initialize = self._forget = None
        self._break("it was destroyed.")
        try:
            if forget is not None:
                forget()
        finally:
            if memory is not None:
                memory.close()

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
            problem = f"{call} while a round is open: call combine first, of zeros if need be"
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
                f"{call} while the memory is released ({who}): call {_RESTORE} on all ranks first."
            )

    def initialize(self, comm: CommBackend) -> None:
        """Prepare the memory on all ranks. Collective: no rank may signal before all are ready."""
        outcome = attempt(self._initialize or (lambda: None))
        agree(comm, outcome, what="initialising the workspace")

    def reinitialize(self, comm: CommBackend, settle: Callable[[], None], *, in_part: bool) -> None:
        """Begin anew in the same memory. Collective over `comm`; see
        MoEEpCommunication.reinitialize.

        settle: waits for own rounds, whatever became of them.
        in_part: whether some of the group's ranks may be missing.
        """

        def ready() -> int:
            self._require_memory_to_reinitialize()
            size = comm.get_size()
            if not in_part and size != self._ep_size:
                raise MoEEpConfigError(
                    f"comm_backend must have all {self._ep_size} ranks of the group, since no mask "
                    f"leaves the others out (enable_rank_mask), got {size}"
                )
            settle()
            return self._ep_rank

        present = agree(comm, attempt(ready), what=_REINITIALIZE)
        if len(set(present)) < len(present):
            raise MoEEpConfigError(
                f"comm_backend must have each rank of the group at most once, got {present}."
            )
        self._break(f"{_REINITIALIZE} did not finish.")
        self.initialize(comm)
        for member in self._members:
            member._drop_round()
        self.backward = None
        self.state, self.broken_by = IDLE, _INTERRUPTED

    def _require_memory_to_reinitialize(self) -> None:
        if self.memory is None:
            raise MoEEpStateError(
                f"{_REINITIALIZE} on a communication that has no memory: destroy it and create it "
                "again, over a new process group if a wait has expired."
            )
        if self.state == RELEASED:
            raise MoEEpStateError(
                f"{_REINITIALIZE} while the memory is released: call {_RESTORE} on all ranks, "
                "which begins anew as well."
            )
        if self.memory.state != "mapped":
            raise MoEEpStateError(
                f"{_REINITIALIZE} without memory: {self.remedy}. It broke because: {self.broken_by}"
            )

    def prepare(self, settle: Callable[[], None]) -> None:
        """Release the memory and keep its addresses. Collective, idempotent; see
        MoEEpCommunication.checkpoint_prepare.

        settle: waits for own rounds and raises what they recorded.
        """
        states = self._meet(self.comm, _PREPARE, settle)
        if set(states) == {RELEASED}:
            return
        self._break(f"{_PREPARE} did not finish.")  # until it has: it may be interrupted
        try:
            release = (lambda: None) if self.memory is None else self.memory.release
            agree(self.comm, attempt(release), what=_PREPARE)
        except BaseException as error:
            self._break_off(error)
        self.state, self.broken_by = RELEASED, _INTERRUPTED

    def restore(self, comm: CommBackend) -> None:
        """Put new memory behind the addresses. Collective over `comm`, idempotent; see
        MoEEpCommunication.checkpoint_restore.
        """
        states = self._meet(comm, _RESTORE)
        if set(states) == {IDLE}:
            self.comm = comm
            return
        if set(states) != {RELEASED}:
            table = by_rank(dict(enumerate(states)))
            raise MoEEpStateError(
                f"{_RESTORE} needs all ranks to have released the memory, got {table}. Call "
                f"{_PREPARE} on all of them first."
            )
        self._break(f"{_RESTORE} did not finish.")
        try:
            if self.memory is not None:
                self.memory.restore(comm)
            self.initialize(comm)
        except BaseException as error:
            if self.memory is not None and self.memory.state == "released":
                # Nothing was made yet on any rank: they may try again.
                self.state, self.broken_by = RELEASED, _INTERRUPTED
                raise
            self._break_off(error)
        self.state, self.broken_by, self.comm = IDLE, _INTERRUPTED, comm

    def _meet(
        self, comm: CommBackend, call: str, settle: Callable[[], None] | None = None
    ) -> list[str]:
        """Return every rank's state; raise on all ranks if one of them is not between rounds."""

        def ready() -> str:
            if (comm.get_rank(), comm.get_size()) != (self._ep_rank, self._ep_size):
                raise MoEEpConfigError(
                    f"comm_backend must be rank {self._ep_rank} of {self._ep_size}, as when the "
                    f"communication was created, got rank {comm.get_rank()} of {comm.get_size()}. "
                    "Pass a group of the same ranks in the same order."
                )
            if self.state == DISPATCHED:
                raise MoEEpStateError(f"{call} while a round is open: call combine first.")
            if self.state == BROKEN:
                raise MoEEpStateError(
                    f"{call} on a broken communication: {self.remedy}. It broke because: "
                    f"{self.broken_by}"
                )
            if settle is not None and self.state == IDLE:
                settle()
            return self.state

        return agree(comm, attempt(ready), what=call)

    def _break(self, reason: str) -> None:
        self.state, self.broken_by = BROKEN, reason

    def _break_off(self, error: BaseException) -> NoReturn:
        """Raise for a step that some ranks have done and others not. The memory is gone then."""
        if self.memory is not None:
            self.memory.break_off()
        self.remedy = "restart the ranks"
        if not isinstance(error, MoEEpError):
            raise error
        self.broken_by = str(error)
        raise type(error)(
            f"{error} The workspace is broken on all ranks, and they must restart: what knows its "
            "addresses (CUDA graphs, views) has no memory behind them any more."
        ) from error.__cause__
