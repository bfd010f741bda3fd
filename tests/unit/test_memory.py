"""The owning types of csrc/memory in one process: what they map, refuse and leave behind."""

import ctypes
import faulthandler
import gc
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from moe_ep import _native

PAGE = _native.host_memory().granularity
NONCE = bytes(range(16))


def new_memory(
    segment_bytes: int, *, ep_rank: int = 0, ep_size: int = 1
) -> _native.SegmentedMemory:
    return _native.SegmentedMemory(_native.host_memory(), ep_rank, ep_size, segment_bytes)


def tensor_of(memory: _native.SegmentedMemory) -> torch.Tensor:
    return torch.from_dlpack(memory.to_dlpack())


def group_of_two(segment_bytes: int) -> list[_native.SegmentedMemory]:
    """Two ranks in this process."""
    ranks = [new_memory(segment_bytes, ep_rank=r, ep_size=2) for r in range(2)]
    join(ranks)
    return ranks


def join(ranks: list[_native.SegmentedMemory]) -> None:
    channels = [_native.FdChannel(rank, NONCE) for rank in range(2)]
    for memory in ranks:
        memory.back_own_segment()
    for me, peer in ((0, 1), (1, 0)):
        channels[me].send(channels[peer].name, 0, ranks[me].share_own_segment(), 5)
    for me, peer in ((0, 1), (1, 0)):
        rank, _, handle = channels[me].receive(5)
        assert rank == peer
        assert handle is not None
        ranks[me].map_peer_segment(rank, handle)


def shared_resident_bytes() -> int:
    """Of this process, in shared memory that it has touched."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssShmem:")[1].split()[0]) * 1024


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings_of_memfd() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:moe_ep")


@contextmanager
def nothing_left() -> Iterator[None]:
    gc.collect()
    before = descriptors(), mappings_of_memfd()
    yield
    gc.collect()
    assert (descriptors(), mappings_of_memfd()) == before


def signal_that_ends(action: Callable[[], object]) -> int:
    """The signal that a child process dies of when it does this; 0 if it lives."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        action()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.mark.parametrize("segment_bytes", [1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE])
@pytest.mark.parametrize("ep_size", [1, 2, 7])
def test_segments_have_whole_pages_and_room_behind_them(segment_bytes: int, ep_size: int) -> None:
    memory = new_memory(segment_bytes, ep_size=ep_size)
    assert memory.mapped_bytes == -(-segment_bytes // PAGE) * PAGE
    assert memory.rank_stride > memory.mapped_bytes
    assert memory.range_bytes == ep_size * memory.rank_stride


def test_sizes_are_64_bit() -> None:
    memory = new_memory(3 << 30, ep_size=256)  # addresses only
    assert memory.range_bytes > 768 << 30


def test_tensor_is_the_whole_range_and_starts_zero() -> None:
    first, _ = group_of_two(PAGE + 1)
    tensor = tensor_of(first)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (2, PAGE + 1)
    assert tensor.stride() == (first.rank_stride, 1)
    assert tensor.data_ptr() == first.address
    assert not tensor.any()


def test_every_rank_sees_what_any_rank_writes() -> None:
    ranks = group_of_two(1000)
    tensors = [tensor_of(memory) for memory in ranks]
    tensors[0][1] = torch.arange(1000).to(torch.uint8)
    tensors[1][0] = 7
    assert torch.equal(tensors[0], tensors[1])
    assert tensors[0].data_ptr() != tensors[1].data_ptr()


@pytest.mark.parametrize("row", [0, 1])
def test_overrun_faults(row: int) -> None:
    memory, _ = group_of_two(PAGE)
    end = memory.address + row * memory.rank_stride + memory.mapped_bytes
    assert signal_that_ends(lambda: ctypes.memset(end - 1, 1, 1)) == 0
    for beyond in (end, end + memory.rank_stride - memory.mapped_bytes - 1):
        assert signal_that_ends(lambda at=beyond: ctypes.memset(at, 1, 1)) == signal.SIGSEGV


def test_released_addresses_fault() -> None:
    memory, _ = group_of_two(PAGE)
    memory.release()
    assert memory.state == "released"
    for at in (memory.address, memory.address + memory.rank_stride):
        assert signal_that_ends(lambda at=at: ctypes.string_at(at, 1)) == signal.SIGSEGV


def test_release_gives_memory_back_and_restore_finds_the_same_addresses() -> None:
    size = 8 << 20
    gc.collect()  # what tests before this one have left
    untouched, mapped = shared_resident_bytes(), mappings_of_memfd()
    ranks = group_of_two(size)
    tensors = [tensor_of(memory) for memory in ranks]
    addresses = [memory.address for memory in ranks]
    for round_ in range(3):
        tensors[0].fill_(round_ + 1)
        assert shared_resident_bytes() - untouched >= 2 * size
        for memory in ranks:
            memory.release()
            memory.release()  # idempotent
        # No mapping and no descriptor refers to it any more: the kernel has it back.
        assert shared_resident_bytes() <= untouched + PAGE
        assert mappings_of_memfd() == mapped
        join(ranks)
        assert [memory.address for memory in ranks] == addresses
        # The tensors of before, over new memory.
        assert not tensors[0].any()
        tensors[1][0] = 9
        assert bool((tensors[0][0] == 9).all())


def test_mapped_memory_holds_no_descriptor() -> None:
    before = descriptors()
    group = group_of_two(PAGE)
    assert descriptors() == before
    assert [memory.state for memory in group] == ["mapped", "mapped"]


def test_live_view_keeps_the_memory() -> None:
    with nothing_left():
        memory = new_memory(PAGE)
        memory.back_own_segment()
        view = tensor_of(memory)[0, 10:20]
        view.fill_(3)
        del memory
        gc.collect()
        assert view.tolist() == [3] * 10
        del view


def test_capsule_that_nobody_takes_keeps_nothing() -> None:
    with nothing_left():
        memory = new_memory(PAGE)
        memory.back_own_segment()
        capsule = memory.to_dlpack()
        del memory, capsule


def test_200_cycles_leave_nothing() -> None:
    group_of_two(PAGE)
    with nothing_left():
        resident = shared_resident_bytes()
        for _ in range(200):
            tensor_of(group_of_two(16 * PAGE)[0]).fill_(1)
    assert shared_resident_bytes() <= resident + PAGE


def test_handle_can_be_used_once() -> None:
    first, second = (new_memory(PAGE, ep_rank=r, ep_size=3) for r in range(2))
    first.back_own_segment()
    second.back_own_segment()
    handle = second.share_own_segment()
    first.map_peer_segment(1, handle)
    assert handle.descriptor == -1
    with pytest.raises(OSError, match="cannot import a handle"):
        first.map_peer_segment(2, handle)


def test_handle_of_another_size_is_refused() -> None:
    first = new_memory(PAGE, ep_rank=0, ep_size=2)
    second = new_memory(2 * PAGE, ep_rank=1, ep_size=2)
    first.back_own_segment()
    second.back_own_segment()
    with pytest.raises(ValueError, match=rf"rank 1 must have {PAGE} bytes .* got {2 * PAGE}"):
        first.map_peer_segment(1, second.share_own_segment())
    assert first.state == "joining"


@pytest.mark.parametrize("rank", [-1, 0, 2])
def test_only_a_missing_peer_can_be_mapped(rank: int) -> None:
    memory = new_memory(PAGE, ep_size=2)
    memory.back_own_segment()
    with pytest.raises(ValueError, match=f"got {rank}"):
        memory.map_peer_segment(rank, memory.share_own_segment())


def test_steps_out_of_order_say_what_they_need() -> None:
    memory = new_memory(PAGE)
    with pytest.raises(RuntimeError, match="share_own_segment needs memory that is joining"):
        memory.share_own_segment()
    with pytest.raises(RuntimeError, match="needs memory that is mapped, got released"):
        memory.to_dlpack()
    memory.back_own_segment()
    with pytest.raises(RuntimeError, match="needs memory that is released, got mapped"):
        memory.back_own_segment()
    memory.break_off()
    memory.release()  # nothing left to release
    assert memory.state == "broken"
    with pytest.raises(RuntimeError, match="needs memory that is released, got broken"):
        memory.back_own_segment()


@pytest.mark.parametrize(
    ("ep_rank", "ep_size", "segment_bytes", "message"),
    [
        (0, 0, 1, "got ep_rank 0, ep_size 0"),
        (2, 2, 1, "got ep_rank 2, ep_size 2"),
        (-1, 2, 1, "got ep_rank -1"),
        (0, 1, 0, r"segment_bytes must lie in \[1, 2\^56\], got 0"),
        (0, 1, 2**64 - 1, "got 18446744073709551615"),
        (0, 2, 2**56, "exceed the address space"),
    ],
)
def test_impossible_sizes_are_refused(
    ep_rank: int, ep_size: int, segment_bytes: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        new_memory(segment_bytes, ep_rank=ep_rank, ep_size=ep_size)


def test_more_memory_than_there_is_is_an_error() -> None:
    available, _ = _native.available_memory()
    with nothing_left():
        memory = new_memory(2 * available)
        with pytest.raises(OSError, match=f"needs .* bytes of memory, {'.*'} are available"):
            memory.back_own_segment()
        assert memory.state == "released"
        del memory


def test_peer_cannot_shrink_the_memory() -> None:
    memory = new_memory(PAGE, ep_size=2)
    memory.back_own_segment()
    handle = memory.share_own_segment()
    with pytest.raises(PermissionError):
        os.ftruncate(handle.descriptor, 0)


def test_descriptors_do_not_survive_exec() -> None:
    memory = new_memory(PAGE, ep_size=2)
    memory.back_own_segment()
    handle = memory.share_own_segment()
    assert not os.get_inheritable(handle.descriptor)
    receiver, sender = _native.FdChannel(0, NONCE), _native.FdChannel(1, NONCE)
    sender.send(receiver.name, 0, handle, 5)
    _, _, handle = receiver.receive(5)
    assert handle is not None
    assert not os.get_inheritable(handle.descriptor)


# The channel


def shared_page() -> _native.ShareableHandle:
    memory = new_memory(PAGE, ep_size=2)
    memory.back_own_segment()
    return memory.share_own_segment()


def connection_to(channel: _native.FdChannel) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect("\0" + channel.name)
    return stranger


def test_message_carries_rank_round_and_size() -> None:
    receiver, sender = _native.FdChannel(0, NONCE), _native.FdChannel(5, NONCE)
    sender.send(receiver.name, 2**32 - 1, shared_page(), 5)
    rank, round_, handle = receiver.receive(5)
    assert (rank, round_) == (5, 2**32 - 1)
    assert handle is not None
    assert handle.bytes == PAGE
    assert os.fstat(handle.descriptor).st_size == PAGE


def test_names_are_random() -> None:
    names = {_native.FdChannel(0, NONCE).name for _ in range(20)}
    assert len(names) == 20


def test_messages_of_strangers_are_dropped() -> None:
    receiver = _native.FdChannel(0, NONCE)
    other_group = _native.FdChannel(1, bytes(16))
    page = shared_page()
    with nothing_left():
        other_group.send(receiver.name, 0, page, 5)
        for message in (b"", b"x", b"x" * 48, b"x" * 4096):
            with connection_to(receiver) as stranger:
                socket.send_fds(stranger, [message], [page.descriptor] * 3)
        with connection_to(receiver):
            pass
        sender = _native.FdChannel(1, NONCE)
        sender.send(receiver.name, 0, page, 5)
        rank, _, handle = receiver.receive(5)
        assert rank == 1
        assert handle is not None
        assert receiver.refused == 6
        del sender, handle


def test_a_peer_may_stop_between_its_connection_and_its_message() -> None:
    receiver, stopped, other = (_native.FdChannel(rank, NONCE) for rank in range(3))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as in_between:
        in_between.bind("\0" + f"moe_ep-test-{os.getpid()}")
        in_between.listen()
        stopped.send(f"moe_ep-test-{os.getpid()}", 4, shared_page(), 5)
        with in_between.accept()[0] as from_stopped:
            message, descriptors, *_ = socket.recv_fds(from_stopped, 4096, 1)
    with connection_to(receiver) as late:
        other.send(receiver.name, 4, shared_page(), 5)
        assert receiver.receive(5)[0] == 2  # nobody waits for one that is silent
        socket.send_fds(late, [message], descriptors)
    assert receiver.receive(5)[0] == 1
    assert receiver.refused == 0
    os.close(*descriptors)


def test_message_without_room_for_its_descriptor_is_an_error() -> None:
    receiver, sender = _native.FdChannel(0, NONCE), _native.FdChannel(3, NONCE)
    sender.send(receiver.name, 0, shared_page(), 5)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    # Room for the connection, none for the descriptor in it.
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))
    try:
        with pytest.raises(OSError, match="handle of rank 3 arrived without its descriptor"):
            receiver.receive(5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_waits_end_in_time() -> None:
    channel = _native.FdChannel(0, NONCE)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="no message arrived in time"):
        channel.receive(0.2)
    assert 0.2 <= time.monotonic() - begin < 5


def test_peer_that_is_gone_is_an_error_at_once() -> None:
    gone = _native.FdChannel(1, NONCE).name
    with pytest.raises(ConnectionRefusedError, match="cannot reach the socket of a peer"):
        _native.FdChannel(0, NONCE).send(gone, 0, shared_page(), 5)


def test_message_arrives_though_its_sender_has_gone() -> None:
    receiver = _native.FdChannel(0, NONCE)
    _native.FdChannel(1, NONCE).send(receiver.name, 0, shared_page(), 5)
    rank, _, handle = receiver.receive(5)
    assert rank == 1
    assert handle is not None


class WaitInterruptedError(Exception):
    pass


def test_signal_ends_a_wait() -> None:
    def interrupt(*_: object) -> None:
        raise WaitInterruptedError

    previous = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    begin = time.monotonic()

    def wait() -> None:
        timer.start()
        _native.FdChannel(0, NONCE).receive(100)

    try:
        with pytest.raises(WaitInterruptedError):
            wait()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)
    assert time.monotonic() - begin < 5


def exchange_in_threads(
    bodies: list[Callable[[_native.FdChannel, list[str]], object]],
) -> list[object]:
    """What each rank's body, given its channel and all names, returns or raises."""
    channels = [_native.FdChannel(rank, NONCE) for rank in range(len(bodies))]
    names = [channel.name for channel in channels]
    results: list[object] = [None] * len(bodies)

    def run(rank: int) -> None:
        try:
            results[rank] = bodies[rank](channels[rank], names)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_exchange_brings_every_handle_to_every_rank(ranks: int) -> None:
    pages = [shared_page() for _ in range(ranks)]
    inodes = [os.fstat(page.descriptor).st_ino for page in pages]

    def body(rank: int) -> Callable[[_native.FdChannel, list[str]], object]:
        return lambda channel, names: channel.exchange(rank, names, 4, pages[rank], 20)

    for rank, handles in enumerate(exchange_in_threads([body(rank) for rank in range(ranks)])):
        assert isinstance(handles, list), handles
        got = [os.fstat(h.descriptor).st_ino if h is not None else None for h in handles]
        assert got == [inode if r != rank else None for r, inode in enumerate(inodes)]


def test_rank_that_gives_up_ends_the_exchange_of_all() -> None:
    pages = [shared_page() for _ in range(3)]

    def takes_part(rank: int) -> Callable[[_native.FdChannel, list[str]], object]:
        return lambda channel, names: channel.exchange(rank, names, 0, pages[rank], 100)

    def fails(channel: _native.FdChannel, names: list[str]) -> object:
        return channel.exchange(2, names, 7, pages[2], 100)  # another round

    results = exchange_in_threads([takes_part(0), takes_part(1), fails])
    assert all(isinstance(result, (RuntimeError, OSError)) for result in results), results
    assert not any(isinstance(result, TimeoutError) for result in results), results
    assert any("is in exchange" in str(result) for result in results), results


@pytest.mark.parametrize("when", ["before", "during"])
def test_rank_that_has_ended_is_named_long_before_the_deadline(when: str) -> None:
    own, others = _native.FdChannel(0, NONCE), [_native.FdChannel(1, NONCE)]
    names = [own.name, others[0].name]
    ending = threading.Timer(0 if when == "before" else 0.7, others.clear)
    ending.start()
    if when == "before":
        ending.join()
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match="rank 1 has left the exchange"):
        own.exchange(0, names, 0, shared_page(), 100)
    assert time.monotonic() - begin < 5  # within a second on a machine without other work


def test_slow_rank_is_not_taken_for_one_that_has_ended() -> None:
    pages = [shared_page() for _ in range(3)]

    def body(rank: int) -> Callable[[_native.FdChannel, list[str]], object]:
        def takes_part(channel: _native.FdChannel, names: list[str]) -> object:
            if rank == 2:
                time.sleep(1.3)
            handles = channel.exchange(rank, names, 0, pages[rank], 20)
            return [handle is not None for handle in handles], channel.refused

        return takes_part

    wanted = [([peer != rank for peer in range(3)], 0) for rank in range(3)]
    assert exchange_in_threads([body(rank) for rank in range(3)]) == wanted


def test_what_a_rank_has_sent_before_it_ended_counts() -> None:
    own, others = _native.FdChannel(0, NONCE), [_native.FdChannel(1, NONCE)]
    names = [own.name, others[0].name]

    def send_late_and_end() -> None:
        others[0].send(names[0], 0, shared_page(), 5)
        others.clear()

    timer = threading.Timer(0.7, send_late_and_end)
    timer.start()
    handles = own.exchange(0, names, 0, shared_page(), 20)
    assert [handle is not None for handle in handles] == [False, True]


def test_missing_rank_is_named() -> None:
    results = exchange_in_threads(
        [
            lambda channel, names: channel.exchange(0, names, 0, shared_page(), 0.3),
            lambda channel, names: time.sleep(0.6),
        ]
    )
    assert isinstance(results[0], TimeoutError)
    assert "no handle of rank 1 arrived in time" in str(results[0])
