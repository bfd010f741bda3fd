"""Do all ranks go on together, or all raise with every rank's reason?"""

import threading
import weakref

import pytest

from moe_ep import MoEEpConfigError, MoEEpPlatformError, MoEEpTimeoutError
from moe_ep.collectives import (
    CommBackend,
    SingleRankComm,
    agree,
    as_comm_backend,
    attempt,
    by_rank,
)


class ThreadComm:
    """One rank of a group of threads."""

    def __init__(self, rank, objects, barrier):
        self.rank, self.objects, self.waiting = rank, objects, barrier

    def get_rank(self):
        return self.rank

    def get_size(self):
        return len(self.objects)

    def allgather(self, obj):
        self.objects[self.rank] = obj
        self.waiting.wait(60)
        gathered = list(self.objects)
        self.waiting.wait(60)
        return gathered

    def barrier(self):
        self.waiting.wait(60)


def agree_on_threads(*outcomes):
    """Return what agree returned or raised on each rank."""
    objects, barrier = [None] * len(outcomes), threading.Barrier(len(outcomes))
    results = [None] * len(outcomes)

    def run(rank):
        try:
            results[rank] = agree(
                ThreadComm(rank, objects, barrier), outcomes[rank], what="mapping"
            )
        except Exception as exc:
            results[rank] = exc

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(outcomes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    return results


def test_values_are_returned_in_rank_order():
    assert agree_on_threads("a", "b", "c") == [["a", "b", "c"]] * 3


def test_one_failure_raises_on_all_ranks_with_every_reason():
    failure = MoEEpConfigError("no memory.")
    for rank, raised in enumerate(agree_on_threads("a", failure, "c")):
        assert type(raised) is MoEEpConfigError
        assert str(raised) == "mapping failed: ranks 0, 2: fine; rank 1: no memory."
        assert raised.__cause__ is (failure if rank == 1 else None)


@pytest.mark.parametrize("other", [OSError("no memory"), MoEEpTimeoutError("late")])
def test_failures_of_several_or_foreign_classes_are_platform_errors(other):
    first, second = agree_on_threads(MoEEpConfigError("bad"), other)
    assert type(first) is type(second) is MoEEpPlatformError
    assert "rank 0: bad; rank 1: " in str(first)
    if isinstance(other, OSError):
        assert "OSError: no memory" in str(first)


def test_equal_values_stand_together():
    assert by_rank({0: 8, 1: 8, 2: 16}) == "ranks 0, 1: 8; rank 2: 16"


def test_hosts_are_named_where_there_are_several():
    assert by_rank({0: "fine", 1: "no"}, ["a", "b"]) == "rank 0 (host a): fine; rank 1 (host b): no"
    assert by_rank({0: "fine", 1: "no"}, ["a", "a"]) == "rank 0: fine; rank 1: no"


def test_an_mpi4py_communicator_is_accepted():
    class Mpi4py:
        def Get_rank(self):  # noqa: N802
            return 1

        def Get_size(self):  # noqa: N802
            return 2

        def allgather(self, obj):
            return (obj, obj)

        def Barrier(self):  # noqa: N802
            pass

    comm = as_comm_backend(Mpi4py())
    assert (comm.get_rank(), comm.get_size(), comm.allgather("x")) == (1, 2, ["x", "x"])
    comm.barrier()
    assert isinstance(comm, CommBackend)


def test_a_comm_backend_is_taken_as_it_is():
    comm = SingleRankComm()
    assert as_comm_backend(comm) is comm


@pytest.mark.parametrize("error", [TypeError, KeyError])
def test_wrong_arguments_keep_their_class(error):
    for raised in agree_on_threads("a", error("bad name.")):
        assert type(raised) is error
        assert raised.args == ("mapping failed: rank 0: fine; rank 1: bad name.",)


def test_ranks_in_different_steps_all_raise():
    objects, barrier = [None] * 2, threading.Barrier(2)
    raised = [None] * 2

    def run(rank):
        with pytest.raises(MoEEpConfigError) as caught:
            agree(ThreadComm(rank, objects, barrier), "a", what=f"step {rank}")
        raised[rank] = str(caught.value)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    wanted = "the ranks are in different steps: rank 0: step 0; rank 1: step 1. "
    assert [text.startswith(wanted) for text in raised] == [True, True]


def test_alone_a_known_error_is_raised_as_it_is():
    failure = MoEEpConfigError("bad")
    with pytest.raises(MoEEpConfigError) as raised:
        agree(SingleRankComm(), failure, what="mapping")
    assert raised.value is failure
    with pytest.raises(MoEEpPlatformError, match="mapping failed: rank 0: OSError: no memory"):
        agree(SingleRankComm(), OSError("no memory"), what="mapping")


class Held:
    """Stands for memory or a descriptor."""


def test_a_failure_holds_nothing_of_the_frames_that_it_and_its_cause_came_from():
    held = []

    def fails():
        memory = Held()
        held.append(weakref.ref(memory))
        raise RuntimeError("no memory")

    def step():
        memory = Held()
        held.append(weakref.ref(memory))
        try:
            fails()
        except RuntimeError as error:
            raise MoEEpPlatformError("cannot map") from error

    failure = attempt(step)
    assert isinstance(failure, MoEEpPlatformError)
    assert isinstance(failure.__cause__, RuntimeError)
    assert [one() for one in held] == [None, None]
