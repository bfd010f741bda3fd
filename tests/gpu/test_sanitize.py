"""Does the sanitizer's run fail on whatever is not clean?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.sanitize import find_sanitizer, problem_in

PLAYED = "rank 0: all rounds are exact\nrank 1: all rounds are exact\n"
CLEAN = "========= ERROR SUMMARY: 0 errors\n"
CLEAN_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


@pytest.mark.parametrize("summary", [CLEAN, 2 * CLEAN, CLEAN_RACES])
def test_a_clean_run_has_no_problem(summary: str) -> None:
    assert problem_in(PLAYED + summary, 0) is None


@pytest.mark.parametrize(
    ("report", "status", "problem"),
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
        (CLEAN, 0, "0 ranks of 2"),
    ],
)
def test_anything_else_is_a_problem(report: str, status: int, problem: str) -> None:
    found = problem_in(report, status)
    assert found is not None
    assert problem in found


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
