"""Does the example in README.md run as it stands, and is its result right?"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 17


def example() -> str:
    """The first Python block of the README."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def largest_errors(output: str) -> dict[str, float]:
    """What each rank printed, by "rank of world size"."""
    lines = re.findall(r"rank (\d+ of \d+): largest error ([\d.]+)", output)
    return {rank: float(error) for rank, error in lines}


@pytest.mark.skipif("WORLD_SIZE" in os.environ, reason="starts ranks of its own")
@pytest.mark.parametrize("ranks", [1, 4])
def test_readme_example_runs_as_it_stands(tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "example.py"
    script.write_text(example())
    command = [sys.executable, str(script)]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command[1:1] = launcher
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    errors = largest_errors(result.stdout)
    assert set(errors) == {f"{rank} of {ranks}" for rank in range(ranks)}
    # Values below 16; each partial row and each sum is rounded to bfloat16 (8 bits) once.
    assert max(errors.values()) <= 16 / 2**8


def test_readme_example_is_short() -> None:
    assert sum(bool(line.strip()) for line in example().splitlines()) <= MAX_LINES
