"""Ranks as in a container: a program that starts some, and is one, under the restrictions it is
told.

python -m tests.ranks.contained RANKS RESTRICTION...    play rounds on so many ranks
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from moe_ep import BootstrapConfig, MoEEpCommParams, create_communication
from tests.rounds import check, play_round, random_round

# A workspace of more than the 64 MiB that containers have in /dev/shm.
PARAMS = MoEEpCommParams(8, 4, 2048, 4096)
BACKENDS = ("cake", "nvlink_one_sided", "nvlink_two_sided")
DONE = "all rounds are right"

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 4, 38, 22, 2
_PIDFD_GETFD, _EPERM = 438, 1  # the same number on all architectures
_PTRACE = {"x86_64": (101, 310, 311), "aarch64": (117, 270, 271)}  # and process_vm_readv, writev
_PORT_BYTES = 5
_LIBC = ctypes.CDLL(None, use_errno=True)


def no_ptrace() -> None:
    """Nobody may look into this process, nor take its descriptors."""
    assert _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0


def seccomp() -> None:
    """pidfd_getfd, ptrace and the like are refused, as by the profiles of container runtimes."""
    refused = (_PIDFD_GETFD, *_PTRACE[platform.machine()])
    load_number = (0x20, 0, 0, 0)  # BPF_LD | BPF_W | BPF_ABS, of seccomp_data.nr
    tests = [(0x15, len(refused) - i, 0, number) for i, number in enumerate(refused)]
    allow, refuse = (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | _EPERM)
    program = [load_number, *tests, allow, refuse]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    filters = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    assert _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filters, 0, 0) == 0
    assert _LIBC.syscall(_PIDFD_GETFD, -1, -1, 0) == -1
    assert ctypes.get_errno() == _EPERM


def small_shm() -> None:
    """/dev/shm has 64 MiB."""
    found = os.statvfs("/dev/shm")
    assert found.f_blocks * found.f_frsize == 64 * 2**20


def read_only() -> None:
    """No file can be written anywhere."""
    for place in ("/", "/tmp", "/dev/shm", "/var/tmp", str(Path.home()), os.getcwd()):
        try:
            Path(place, "a-file").touch()
        except OSError:
            continue
        raise AssertionError(f"{place} can be written")


def ordinary_user() -> None:
    """Neither root nor with any capability."""
    assert os.getuid() == 1000
    status = Path("/proc/self/status").read_text()
    assert int(status.split("CapEff:")[1].split()[0], 16) == 0


RESTRICTIONS = {
    one.__name__: one for one in (no_ptrace, seccomp, small_shm, read_only, ordinary_user)
}


def be_a_rank(restrictions: list[str]) -> None:
    for name in restrictions:
        RESTRICTIONS[name]()
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    bootstrap = BootstrapConfig(size, rank, device="cpu")
    with torch.no_grad():
        for backend in BACKENDS:
            with create_communication(bootstrap, PARAMS, backend) as communication:
                assert "two" in backend or communication.workspace_bytes > 64 * 2**20
                communication.checkpoint_prepare()
                communication.checkpoint_restore()
                for seed in range(3):
                    counts = [40 + seed + r for r in range(size)]
                    one = random_round(PARAMS, counts, seed, tokens_per_rank=max(counts))
                    played = play_round(communication, one)
                    check(PARAMS, one, [played if r == rank else None for r in range(size)])
    print(DONE)


def start(size: int, restrictions: list[str]) -> int:
    port_of_store, tell_port = os.pipe()
    ranks = []
    for rank in range(size):
        # Forked: to import torch takes longer than all rounds. And before the store has threads.
        ranks.append(os.fork())
        if ranks[-1] == 0:
            os.close(tell_port)  # it ends with its parent
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=os.read(port_of_store, _PORT_BYTES).decode().strip(),
                TORCHELASTIC_USE_AGENT_STORE="True",  # nobody can take the port in between
                GLOO_SOCKET_IFNAME="lo",
            )
            be_a_rank(restrictions)
            return 0
    os.close(port_of_store)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(tell_port, f"{store.port:{_PORT_BYTES}}".encode() * size)
    ended = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    return max(map(abs, ended))


if __name__ == "__main__":
    sys.exit(start(int(sys.argv[1]), sys.argv[2:]))
