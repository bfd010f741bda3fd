"""Does the sanitizer's run fail on whatever is not clean?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gpu import sanitize
from tests.gpu.sanitize import blindness, find_sanitizer, problem_in, run_under

PLAYED = "rank 0: all rounds are exact\n"
CLEAN = "========= ERROR SUMMARY: 0 errors\n"
CLEAN_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


@pytest.mark.parametrize("summary", [CLEAN, 2 * CLEAN, CLEAN_RACES])
def test_a_clean_run_has_no_problem(summary: str) -> None:
    assert problem_in(PLAYED + summary, 0) is None


@pytest.mark.parametrize(
    ("output", "status", "problem"),
    [
        (PLAYED + "========= ERROR SUMMARY: 3 errors\n", 0, "3 reports"),
        (PLAYED + CLEAN + "========= ERROR SUMMARY: 1 error\n", 0, "1 reports"),
        (
            PLAYED + "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n",
            0,
            "2 reports",
        ),
        (PLAYED + CLEAN, 86, "exit status 86"),
        (PLAYED, 0, "no summary"),
        (CLEAN, 0, "did not play"),
        (PLAYED, None, "not done after"),
        ("========= Error: Device not supported.\n", 1, "cannot look into the GPU"),
    ],
)
def test_anything_else_is_a_problem(output: str, status: int | None, problem: str) -> None:
    found = problem_in(output, status)
    assert found is not None
    assert problem in found


def stand_in(folder: Path, *lines: str) -> str:
    """Return the path of a program that stands for the tool; it gets the tool's arguments."""
    program = folder / "compute-sanitizer"
    program.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    program.chmod(0o755)
    return str(program)


def test_each_rank_has_a_tool_without_mps_and_the_options_that_it_needs(tmp_path: Path) -> None:
    tool = stand_in(tmp_path, 'echo "$@"', 'echo "$CUDA_MPS_PIPE_DIRECTORY"', "env", "exit 5")
    results = run_under(tool, "memcheck", [["--rank", "0"], ["--rank", "1"]])
    for rank, (output, status) in enumerate(results):
        command, pipes, *environment = output.splitlines()
        assert status == 5
        assert command.startswith("--tool memcheck --target-processes all --error-exitcode 86 ")
        assert "--kernel-name kns=moe_ep --report-api-errors no " in command
        assert command.endswith(f"-m tests.gpu.sanitize --rank {rank}")
        assert not Path(pipes).exists()
        assert "PYTORCH_NO_CUDA_MEMORY_CACHING=1" in environment


def test_what_does_not_end_is_ended_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sanitize, "SECONDS", 1)
    child = tmp_path / "child"
    tool = stand_in(tmp_path, "echo begun", f"sleep 60 & echo $! > {child}", "wait")
    assert run_under(tool, "racecheck", [[]]) == [("begun\n", None)]
    pid = int(child.read_text())
    for _ in range(100):  # who has no parent left is reaped by another process
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the child still runs")


def test_a_tool_that_reports_no_overrun_is_blind(tmp_path: Path) -> None:
    assert blindness(stand_in(tmp_path, f"echo '{CLEAN.strip()}'")) is not None
    assert blindness(stand_in(tmp_path, "exit 0")) is not None
    assert blindness(stand_in(tmp_path, "echo '========= ERROR SUMMARY: 3 errors'")) is None


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="about machines without a CUDA device")
def test_without_a_gpu_it_is_skipped_with_a_reason() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.gpu.sanitize"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.stdout, result.returncode) == (
        "sanitize.py skipped: needs a CUDA device, found none\n",
        0,
    )


def test_the_sanitizer_is_found_beside_the_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "compute-sanitizer"
    program.write_text("")
    program.chmod(0o755)
    assert find_sanitizer() == str(program)
