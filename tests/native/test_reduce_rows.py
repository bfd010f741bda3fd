"""Is cake's vectorised sum the plain one, bit for bit, whatever vectors the compiler may use?"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("optimise", ["-O0", "-O3", "-O3 -march=native"])
def test_sum_is_the_plain_sum(tmp_path: Path, optimise: str) -> None:
    compiler = os.environ.get("CXX", "c++").split()
    sources = [ROOT / "tests/native/reduce_rows.cpp", ROOT / "csrc/cake/reduce_rows.cpp"]
    program = tmp_path / "reduce_rows"
    flags = ["-std=c++20", *optimise.split(), "-Wno-psabi", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
