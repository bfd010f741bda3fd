"""Does the example in README.md run as it stands, and is its result right?"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
MAX_LINES = 20


def example() -> str:
    """The first Python block of the README."""
    found = re.search(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def largest_errors(output: str) -> dict[str, float]:
    """What each rank printed, by "rank of world size"."""
    lines = re.findall(r"rank (\d+ of \d+): largest error ([\d.]+)", output)
    return {rank: float(error) for rank, error in lines}


@pytest.mark.parametrize("ranks", [1, 4])
def test_readme_example_runs_as_it_stands(tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "example.py"
    script.write_text(example())
    command = [sys.executable, str(script)]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command[1:1] = launcher
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    errors = largest_errors(result.stdout)
    assert set(errors) == {f"{rank} of {ranks}" for rank in range(ranks)}
    # Partial sums are rounded to bfloat16 on the way: 2^-8 of values below 7 * 5.
    assert max(errors.values()) <= 7 * 5 / 2**8


def test_readme_example_is_short() -> None:
    assert sum(bool(line.strip()) for line in example().splitlines()) <= MAX_LINES
