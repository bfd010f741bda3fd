"""How is a program of tests/native built from the sources it tests?"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(program: Path, sources: Sequence[Path], flags: Sequence[str], csrc: Path) -> None:
    """Compile the sources at once with the headers of `csrc`, and link them.

    Skips the test where the compiler has no runtime for a sanitizer.
    """
    compiler = os.environ.get("CXX", "c++").split()
    usual = ["-std=c++20", "-ffp-contract=off", "-Wno-psabi", "-pthread"]  # as in setup.py
    flags = [*usual, *flags, f"-I{csrc}"]
    objects = [f"{program}-{number}.o" for number in range(len(sources))]

    def compiled(source: Path, target: str) -> subprocess.CompletedProcess[str]:
        return _run([*compiler, *flags, "-c", str(source), "-o", target])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(compiled, sources, objects):
            assert result.returncode == 0, result.stderr
    linked = _run([*compiler, *flags, *objects, "-o", str(program)])
    if "cannot find" in linked.stderr and "san" in linked.stderr:
        pytest.skip(f"this compiler has no runtime for {flags}")
    assert linked.returncode == 0, linked.stderr


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def build_threads(
    transport: str, csrc: Path, program: Path, sanitizer: str, source: str = "threads"
) -> None:
    """Build `<transport>_<source>.cpp` under a sanitizer."""
    sources = [ROOT / f"tests/native/{transport}_{source}.cpp"]
    for folder in (transport, "transport", "core"):
        sources += sorted((csrc / folder).glob("*.cpp"))
    build(program, sources, ["-O1", "-g", f"-fsanitize={sanitizer}"], csrc)


def run(program: Path, ranks: int, rounds: int, first: int = 0) -> subprocess.CompletedProcess[str]:
    """Run it with so many ranks and rounds.

    first: where the numbers that wrap at 2**32 begin.
    """
    arguments = map(str, (ranks, rounds, first))
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=200)
