"""Do the examples in README.md and docs/ run as they stand, with the right result?"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 17


def example(page: str = "README.md") -> str:
    """The first Python block of a page."""
    text = (ROOT / page).read_text()
    found = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def largest_errors(output: str) -> dict[str, float]:
    """What each rank printed, by "rank of world size"."""
    lines = re.findall(r"rank (\d+ of \d+): largest error ([\d.]+)", output)
    return {rank: float(error) for rank, error in lines}


def output_of(page: str, folder: Path, ranks: int) -> str:
    """What a page's example prints on so many ranks."""
    script = folder / "example.py"
    script.write_text(example(page))
    command = [sys.executable, str(script)]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command[1:1] = launcher
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


starts_ranks = pytest.mark.skipif("WORLD_SIZE" in os.environ, reason="starts ranks of its own")


@starts_ranks
@pytest.mark.parametrize("ranks", [1, 4])
def test_readme_example_runs_as_it_stands(tmp_path: Path, ranks: int) -> None:
    errors = largest_errors(output_of("README.md", tmp_path, ranks))
    assert set(errors) == {f"{rank} of {ranks}" for rank in range(ranks)}
    # Values below 16; each partial row and each sum is rounded to bfloat16 (8 bits) once.
    assert max(errors.values()) <= 16 / 2**8


@starts_ranks
@pytest.mark.parametrize("ranks", [1, 3])
def test_training_example_runs_as_it_stands(tmp_path: Path, ranks: int) -> None:
    output = output_of("docs/training.md", tmp_path, ranks)
    losses = re.findall(r"rank (\d+) of \d+: loss ([\d.]+) -> ([\d.]+)", output)
    assert sorted(int(rank) for rank, _, _ in losses) == list(range(ranks))
    for _, first, last in losses:
        assert float(last) < 0.9 * float(first)


def test_the_table_of_memory_is_what_its_example_prints(tmp_path: Path) -> None:
    printed = output_of("docs/operations.md", tmp_path, ranks=1)
    assert len(printed.splitlines()) == 8
    assert printed in (ROOT / "docs/operations.md").read_text()


def test_readme_example_is_short() -> None:
    assert sum(bool(line.strip()) for line in example().splitlines()) <= MAX_LINES
