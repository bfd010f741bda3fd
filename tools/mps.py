"""Lets several processes use one GPU at the same time, through an MPS daemon of their own.

    python tools/mps.py COMMAND ARGUMENT...

runs the command beside a daemon and ends the daemon afterwards, however the command ended. Where
there is no `nvidia-cuda-mps-control` or no GPU, it says so and runs the command without.

Without MPS the processes of a GPU take turns of milliseconds, and a kernel that waits for another
process's waits for its turn to end. One daemon serves all GPUs of the machine. For Python:

    with mps_daemon() as daemon:
        environment = {} if daemon is None else daemon.environment
        rank_environment = {**environment, **share_of_gpu(ranks_on_that_gpu)}

The environment of a rank must be set before CUDA is initialised in it. A daemon does not survive a
client that is killed while its kernel waits: start another one then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_CONTROL = "nvidia-cuda-mps-control"
_DEFAULT_PIPES = "/tmp/nvidia-mps"
_NO_PIPES = "/nonexistent"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
# A daemon started with a percentage hands it on to all its clients, and one that sees only some
# GPUs numbers them anew, so that a client's own CUDA_VISIBLE_DEVICES would mean others.
_KEPT_FROM_DAEMON = (_PERCENTAGE, "CUDA_VISIBLE_DEVICES")
_START_SECONDS = 20.0
_QUIT_SECONDS = 10.0


class MpsError(RuntimeError):
    """The daemon did not start."""


@dataclass(frozen=True)
class MpsDaemon:
    """A running daemon that this process started.

    folder: holds its pipes and logs, and goes with it.
    """

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables by which a process finds the daemon."""
        return {_PIPES: str(self.folder / "pipe"), _LOGS: str(self.folder / "log")}

    def stop(self) -> None:
        """End the daemon and its servers: politely, then by force. Clients lose their GPU."""
        pid = _pid_of_daemon(self.environment)
        if pid is not None:
            processes = [pid, *_children_of(pid)]  # later nobody tells which servers were its own
            _ask_to_quit(self.environment)
            _wait_for_end(processes)
            for process in filter(_is_alive, processes):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            _wait_for_end(processes)  # the kernel takes its time to give a GPU back
        shutil.rmtree(self.folder, ignore_errors=True)


def unavailable_reason() -> str | None:
    """Return why no daemon can be started here, or None if one can. Creates no CUDA context."""
    if shutil.which(_CONTROL) is None:
        return f"{_CONTROL} is not on the PATH"
    if gpu_count() == 0:
        return "there is no NVIDIA GPU"
    return None


def gpu_count() -> int:
    """Return how many NVIDIA GPUs the driver has, whatever CUDA_VISIBLE_DEVICES says."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return count.value if status == 0 else 0


def daemon_is_running(environment: Mapping[str, str]) -> bool:
    """Return whether a process with this environment would find a daemon."""
    return _pid_of_daemon(environment) is not None


def daemon_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which others find the daemon that this environment would find."""
    pipes = {_PIPES: environment.get(_PIPES) or _DEFAULT_PIPES}
    return pipes | ({_LOGS: environment[_LOGS]} if environment.get(_LOGS) else {})


def without_daemon(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose processes have their GPU to themselves, between turns.

    Nothing of a daemon that others have broken reaches them, nor do their faults reach it.
    """
    kept = {name: value for name, value in environment.items() if name not in (_LOGS, _PERCENTAGE)}
    return {**kept, _PIPES: _NO_PIPES}  # unset, it would mean the default folder


def start_daemon() -> MpsDaemon:
    """Start a daemon. The caller stops it. Raises MpsError with what the daemon said."""
    daemon = MpsDaemon(Path(tempfile.mkdtemp(prefix="moe_ep_mps_")))
    for folder in daemon.environment.values():
        Path(folder).mkdir()
    environment = {**os.environ, **daemon.environment}
    for name in _KEPT_FROM_DAEMON:
        environment.pop(name, None)
    said = daemon.folder / "start.txt"
    try:
        # To a file: the daemon keeps its output open, and a pipe would be read to its end.
        with said.open("wb") as output:
            status = subprocess.run(
                [_CONTROL, "-d"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the command, which may want to clean up
                timeout=_START_SECONDS,
                check=False,
            ).returncode
        deadline = time.monotonic() + _START_SECONDS
        while status == 0 and not daemon_is_running(daemon.environment):
            if time.monotonic() > deadline:
                status = 1
            time.sleep(0.02)
        if status != 0:
            raise MpsError(f"{_CONTROL} -d did not start a daemon: {_tail_of(daemon.folder)}")
    except BaseException:
        daemon.stop()
        raise
    return daemon


@contextlib.contextmanager
def mps_daemon() -> Iterator[MpsDaemon | None]:
    """Start a daemon for the block; None where `unavailable_reason` has one. Raises MpsError."""
    if unavailable_reason() is not None:
        yield None
        return
    daemon = start_daemon()
    try:
        yield daemon
    finally:
        daemon.stop()


def gpu_of_rank(rank: int, ranks: int, gpus: int) -> int:
    """Return the GPU of a rank where neighbours share one: 4 ranks on 2 GPUs are 0, 0, 1, 1."""
    return rank * gpus // ranks


def ranks_on_gpu_of(rank: int, ranks: int, gpus: int) -> int:
    """Return how many ranks share the GPU of this one, it included."""
    own = gpu_of_rank(rank, ranks, gpus)
    return sum(gpu_of_rank(other, ranks, gpus) == own for other in range(ranks))


def share_of_gpu(ranks_on_gpu: int) -> dict[str, str]:
    """Return the variable that gives a process its part of a GPU's multiprocessors.

    Read when CUDA is initialised, and fixed from then on.
    """
    return {_PERCENTAGE: f"{100 / ranks_on_gpu:g}"}


def _pid_of_daemon(environment: Mapping[str, str]) -> int | None:
    pipes = Path(environment.get(_PIPES) or _DEFAULT_PIPES)
    try:
        pid = int((pipes / f"{_CONTROL}.pid").read_text())
    except (OSError, ValueError):
        return None
    return pid if _is_alive(pid) else None


def _ask_to_quit(environment: Mapping[str, str]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        subprocess.run(
            [_CONTROL],
            env={**os.environ, **environment},
            input=b"quit\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=_QUIT_SECONDS,
            check=False,
        )


def _stat_of(pid: int) -> tuple[str, int] | None:
    """Return a process's state and parent, or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, parent, *_ = text.rpartition(")")[2].split()  # the name before may hold anything
    return state, int(parent)


def _is_alive(pid: int) -> bool:
    stat = _stat_of(pid)
    return stat is not None and stat[0] not in "ZX"  # nobody may wait for a daemon that is dead


def _wait_for_end(processes: Sequence[int]) -> None:
    """Return when all have ended, at the latest after _QUIT_SECONDS."""
    deadline = time.monotonic() + _QUIT_SECONDS
    while any(map(_is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _children_of(pid: int) -> list[int]:
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [number for number in numbers if (_stat_of(number) or ("", -1))[1] == pid]


def _tail_of(folder: Path) -> str:
    texts = [path.read_text(errors="replace") for path in [folder / "start.txt"] if path.exists()]
    texts += [path.read_text(errors="replace") for path in sorted((folder / "log").glob("*"))]
    return "\n".join(texts).strip()[-2000:] or "it said nothing"


class _Command:
    """A command that gets the signals by which somebody asks this process to end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended_by: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._hand_on)

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Return the exit status as a shell shows it."""
        if self._ended_by is not None:
            return 128 + self._ended_by
        try:
            self._process = subprocess.Popen(arguments, env={**os.environ, **environment})
        except OSError as error:
            print(f"{arguments[0]}: {error.strerror}", file=sys.stderr)
            return 127
        status = self._process.wait()
        return 128 - status if status < 0 else status

    def _hand_on(self, number: int, frame: object) -> None:
        if self._process is None:
            self._ended_by = number
        elif number != signal.SIGINT:  # a terminal sends Ctrl-C to the command, too
            self._process.send_signal(number)


def main(arguments: Sequence[str]) -> int:
    """Run the command of the command line; return its exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    command = _Command()
    with mps_daemon() as daemon:
        if daemon is None:
            note = f"{Path(__file__).name}: no MPS daemon, {unavailable_reason()}"
            print(note, file=sys.stderr, flush=True)
        return command.run(arguments, {} if daemon is None else daemon.environment)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MpsError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
