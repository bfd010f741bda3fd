"""Does cake's protocol order what it must? Ranks as threads, watched by the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(csrc: Path, program: Path, sanitizer: str) -> None:
    compiler = os.environ.get("CXX", "c++").split()
    sources = [ROOT / "tests/native/cake_threads.cpp", *sorted((csrc / "cake").glob("*.cpp"))]
    flags = ["-std=c++20", "-O1", "-g", f"-fsanitize={sanitizer}", "-Wno-psabi", "-pthread"]
    command = [*compiler, *flags, f"-I{csrc}", *map(str, sources), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip(f"this compiler has no runtime for -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr


def run(
    program: Path, ranks: int, rounds: int, first_epoch: int = 0
) -> subprocess.CompletedProcess[str]:
    arguments = map(str, (ranks, rounds, first_epoch))
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_rounds_with_delays_are_exact_and_clean(tmp_path: Path, sanitizer: str) -> None:
    program = tmp_path / "cake_threads"
    build(ROOT / "csrc", program, sanitizer)
    wraps = 2**32 - 100
    for ranks, rounds, first_epoch in ((1, 50, 0), (2, 300, wraps), (5, 300, wraps)):
        result = run(program, ranks, rounds, first_epoch)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "every element right" in result.stdout


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("core/host_signal.h", "store(epoch, kSequential)", "store(epoch, kRelaxed)"),
        ("core/atomics.h", "load(kAcquire)", "load(kRelaxed)"),
    ],
)
def test_a_planted_bug_is_found(tmp_path: Path, file: str, right: str, wrong: str) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    text = (csrc / file).read_text()
    assert right in text
    (csrc / file).write_text(text.replace(right, wrong))
    program = tmp_path / "cake_threads"
    build(csrc, program, "thread")
    result = run(program, 4, 100)
    assert result.returncode != 0
    assert "data race" in result.stderr
