"""Does tools/mps.py end the daemon that it started, whatever becomes of the command? The daemon
here is a stand-in, which any machine has.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.ranks.devices import Mps
from tools import mps

ROOT = Path(__file__).parents[2]

CONTROL = """\
#!{python} -S
# Stands in for nvidia-cuda-mps-control: -d leaves a daemon and its server behind, "quit" ends them.
import os, signal, sys, time
folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
pid_file = folder + "/nvidia-cuda-mps-control.pid"
if sys.argv[1:] == ["-d"]:
    if {fails}:
        sys.exit("no luck today")
    if os.fork() == 0:
        os.setsid()
        server = os.fork()
        if server != 0:
            with open({record!r}, "a") as file:
                unset = [name not in os.environ for name in {unset!r}]
                print(os.getpid(), server, folder, *unset, file=file)
            with open(pid_file + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(pid_file + ".new", pid_file)
        time.sleep(60)
elif sys.stdin.read() == "quit\\n" and not {stubborn}:
    for record in open({record!r}).read().splitlines():
        if record.split()[2] == folder:
            for pid in record.split()[:2]:
                os.kill(int(pid), signal.SIGKILL)
"""
UNSET = ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_VISIBLE_DEVICES"]


class StandIn:
    """A control program on the PATH that notes what it starts."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._record = folder / "started.txt"
        self.install()
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        monkeypatch.setattr(mps, "gpu_count", lambda: 1)
        monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
        for name in UNSET:
            monkeypatch.setenv(name, "50")

    def install(self, *, stubborn: bool = False, fails: bool = False) -> None:
        """stubborn: it does not quit when asked. fails: it does not start."""
        program = self._folder / "nvidia-cuda-mps-control"
        program.write_text(
            CONTROL.format(
                python=sys.executable,
                record=str(self._record),
                unset=UNSET,
                stubborn=stubborn,
                fails=fails,
            )
        )
        program.chmod(0o755)

    def started(self) -> list[list[str]]:
        """Return for each daemon: its process, its server's, its folder, what it must not see."""
        if not self._record.exists():
            return []
        return [line.split() for line in self._record.read_text().splitlines()]

    def require_ended(self, daemons: int) -> None:
        records = self.started()
        assert len(records) == daemons
        for daemon, server, folder, *_ in records:
            assert not is_running(daemon)
            assert not is_running(server)
            assert not Path(folder).exists()


def is_running(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(tmp_path, monkeypatch)


def test_the_daemon_lives_as_long_as_the_block(stand_in: StandIn) -> None:
    with mps.mps_daemon() as daemon:
        assert daemon is not None
        assert mps.daemon_is_running(daemon.environment)
        assert not mps.daemon_is_running({"CUDA_MPS_PIPE_DIRECTORY": str(daemon.folder)})
        assert is_running(stand_in.started()[0][0])
    assert not mps.daemon_is_running(daemon.environment)
    stand_in.require_ended(1)


def test_a_daemon_that_does_not_quit_is_killed_with_its_server(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "_QUIT_SECONDS", 2.0)
    with mps.mps_daemon():
        stand_in.install(stubborn=True)
    stand_in.require_ended(1)


def test_an_exception_ends_it_too(stand_in: StandIn) -> None:
    with pytest.raises(ZeroDivisionError), mps.mps_daemon():
        _ = 1 / 0
    stand_in.require_ended(1)


def test_the_daemon_gets_no_percentage_and_sees_all_gpus(stand_in: StandIn) -> None:
    with mps.mps_daemon():
        assert stand_in.started()[0][3:] == ["True", "True"]


def test_a_daemon_that_does_not_start_is_an_error_with_its_words(stand_in: StandIn) -> None:
    stand_in.install(fails=True)
    with pytest.raises(mps.MpsError, match="no luck today"), mps.mps_daemon():
        pass


def test_there_is_none_without_the_control_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(mps, "gpu_count", lambda: 1)
    assert mps.unavailable_reason() == "nvidia-cuda-mps-control is not on the PATH"
    with mps.mps_daemon() as daemon:
        assert daemon is None


def test_there_is_none_without_a_gpu(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "gpu_count", lambda: 0)
    assert mps.unavailable_reason() == "there is no NVIDIA GPU"
    with mps.mps_daemon() as daemon:
        assert daemon is None
    stand_in.require_ended(0)


def test_ranks_take_the_environments_daemon_until_it_may_be_broken(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Mps()
    with mps.mps_daemon() as daemon:
        assert daemon is not None
        for name, value in daemon.environment.items():
            monkeypatch.setenv(name, value)
        assert ranks.environment() == daemon.environment
        ranks.distrust()
        own = ranks.environment()
        assert own != daemon.environment
        assert ranks.environment() == own
        ranks.distrust()
        assert ranks.environment() not in ({}, own)
        ranks.close()
    stand_in.require_ended(3)


def test_others_find_the_daemon_that_an_environment_finds() -> None:
    named = {"CUDA_MPS_PIPE_DIRECTORY": "/a", "CUDA_MPS_LOG_DIRECTORY": "/b"}
    assert mps.daemon_of({**named, "HOME": "/c"}) == named
    assert mps.daemon_of({}) == {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"}


def test_without_a_daemon_none_is_found_and_the_rest_of_the_environment_stays(
    stand_in: StandIn,
) -> None:
    with mps.mps_daemon() as daemon:
        assert daemon is not None
        share = mps.share_of_gpu(2)
        alone = mps.without_daemon({"HOME": "/c", **share, **daemon.environment})
        assert not mps.daemon_is_running(alone)
    assert not Path(alone.pop("CUDA_MPS_PIPE_DIRECTORY")).exists()
    assert alone == {"HOME": "/c"}


def start(*command: str) -> subprocess.Popen[str]:
    """Start tools/mps.py with a command, as on a machine with a GPU."""
    program = "from tools import mps; import sys; mps.gpu_count = lambda: 1; "
    program += "sys.exit(mps.main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", program, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-S", "-c", textwrap.dedent(code)


def test_a_command_finds_the_daemon_and_its_status_is_returned(stand_in: StandIn) -> None:
    code = """
        import os, sys
        folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        print(os.path.exists(folder + "/nvidia-cuda-mps-control.pid"))
        sys.exit(7)
    """
    process = start(*python(code))
    output, errors = process.communicate(timeout=30)
    assert (output, errors, process.returncode) == ("True\n", "", 7)
    stand_in.require_ended(1)


SLEEP = """
    import signal, sys, time
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(0.3)
        print("cleaned up", flush=True)
        sys.exit(3)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name)
def test_an_interrupted_command_may_clean_up_before_the_daemon_ends(
    stand_in: StandIn, number: signal.Signals
) -> None:
    process = start(*python(SLEEP))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    if number == signal.SIGINT:  # as a terminal does: to all of its processes
        (child,) = mps._children_of(process.pid)
        os.kill(child, number)
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("cleaned up\n", 3)
    stand_in.require_ended(1)


def test_a_command_that_is_killed_has_the_shells_status(stand_in: StandIn) -> None:
    process = start(*python("import os; os.kill(os.getpid(), 9)"))
    assert process.wait(timeout=30) == 128 + 9
    stand_in.require_ended(1)


def test_a_command_that_is_not_there_is_named(stand_in: StandIn) -> None:
    process = start("no-such-command")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 127
    assert "no-such-command" in errors
    stand_in.require_ended(1)


def test_where_there_is_no_daemon_the_command_runs_with_a_note(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools/mps.py"), *python("print('here')")],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (result.stdout, result.returncode) == ("here\n", 0)
    assert "no MPS daemon, nvidia-cuda-mps-control is not on the PATH" in result.stderr


def test_the_tool_says_how_it_is_used() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools/mps.py")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 2
    assert "python tools/mps.py COMMAND" in result.stdout


@pytest.mark.parametrize(
    ("ranks", "percentage"), [(1, "100"), (2, "50"), (3, "33.3333"), (8, "12.5")]
)
def test_ranks_of_a_gpu_share_it_evenly(ranks: int, percentage: str) -> None:
    assert mps.share_of_gpu(ranks) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage}


def test_neighbours_share_a_gpu() -> None:
    assert [mps.gpu_of_rank(rank, 5, 2) for rank in range(5)] == [0, 0, 0, 1, 1]
    assert [mps.ranks_on_gpu_of(rank, 5, 2) for rank in range(5)] == [3, 3, 3, 2, 2]
    assert [mps.ranks_on_gpu_of(rank, 2, 4) for rank in range(2)] == [1, 1]
