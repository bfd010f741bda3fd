"""Does the one-sided protocol order what it must? Ranks as threads, watched by the sanitizers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.native.native_program import ROOT, build_threads, run

pytestmark = pytest.mark.timeout(600)  # a busy machine may compile for minutes


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_rounds_with_delays_are_exact_and_clean(tmp_path: Path, sanitizer: str) -> None:
    program = tmp_path / "one_sided_threads"
    build_threads("one_sided", ROOT / "csrc", program, sanitizer)
    wraps = 2**32 - 100
    for ranks, rounds, first_epoch in ((1, 50, 0), (2, 300, wraps), (5, 300, wraps)):
        result = run(program, ranks, rounds, first_epoch)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "every element right" in result.stdout


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        (
            "core/host_signal.h",
            "store(epoch, kSequential)",
            "store(epoch, std::memory_order_relaxed)",
        ),
        ("core/atomics.h", "load(kAcquire)", "load(std::memory_order_relaxed)"),
    ],
)
def test_a_planted_bug_is_found(tmp_path: Path, file: str, right: str, wrong: str) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    text = (csrc / file).read_text()
    assert right in text
    (csrc / file).write_text(text.replace(right, wrong))
    program = tmp_path / "one_sided_threads"
    build_threads("one_sided", csrc, program, "thread")
    result = run(program, 4, 100)
    assert result.returncode != 0
    assert "data race" in result.stderr
