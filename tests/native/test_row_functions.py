"""Are cake's vectorised sums and copies the plain ones, bit for bit, whatever vectors there are?"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("optimise", ["-O0", "-O3", "-O3 -march=native"])
@pytest.mark.parametrize("name", ["reduce_rows", "fp8_rows", "copy_row"])
def test_function_is_the_plain_one(tmp_path: Path, name: str, optimise: str) -> None:
    compiler = os.environ.get("CXX", "c++").split()
    sources = [ROOT / f"tests/native/{name}.cpp", ROOT / f"csrc/cake/{name}.cpp"]
    program = tmp_path / name
    flags = ["-std=c++20", *optimise.split(), "-Wno-psabi", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
