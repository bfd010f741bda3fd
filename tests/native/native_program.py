"""How is a program of tests/native built from the sources it tests?"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# By compiler, flags and preprocessed text. A planted bug is in few of a program's sources; the
# others are compiled for the first program only.
_OBJECTS: dict[bytes, Path] = {}


def build(program: Path, sources: Sequence[Path], flags: Sequence[str], csrc: Path) -> None:
    """Compile the sources at once with the headers of `csrc`, and link them.

    Skips the test where the compiler has no runtime for a sanitizer.
    """
    compiler = os.environ.get("CXX", "c++").split()
    usual = ["-std=c++20", "-ffp-contract=off", "-Wno-psabi", "-pthread"]  # as in setup.py
    flags = [*usual, *flags, f"-I{csrc}"]

    def compiled(source: Path, target: Path) -> Path:
        text = _run([*compiler, *flags, "-E", "-P", str(source)])
        assert text.returncode == 0, text.stderr
        what = compiler, tuple(flags[:-1]), text.stdout
        known = hashlib.sha256(repr(what).encode()).digest()
        if not _OBJECTS.get(known, target).exists():
            result = _run([*compiler, *flags, "-c", str(source), "-o", str(target)])
            assert result.returncode == 0, result.stderr
            _OBJECTS[known] = target
        return _OBJECTS[known]

    targets = [Path(f"{program}-{number}.o") for number in range(len(sources))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(one) for one in pool.map(compiled, sources, targets)]
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
    build(program, sources, ["-O1", "-g1", f"-fsanitize={sanitizer}"], csrc)


def run(
    program: Path, ranks: int, rounds: int, first: int = 0, patience: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it with so many ranks and rounds.

    first: where the numbers that wrap at 2**32 begin.
    patience: seconds of a wait, for a two-sided program in which waits are known not to end.
    """
    seed = 1
    of_waits = () if patience is None else (seed, patience)
    arguments = map(str, (ranks, rounds, first, *of_waits))
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=200)
