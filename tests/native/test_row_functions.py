"""Are the vectorised sums and copies the plain ones, bit for bit, whatever vectors there are?"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native.native_program import ROOT, build


@pytest.mark.parametrize("optimise", ["-O0", "-O3", "-O3 -march=native"])
@pytest.mark.parametrize(
    "source", ["transport/reduce_rows.cpp", "one_sided/fp8_rows.cpp", "transport/copy_row.cpp"]
)
def test_function_is_the_plain_one(tmp_path: Path, source: str, optimise: str) -> None:
    name = Path(source).stem
    csrc, program = ROOT / "csrc", tmp_path / name
    build(program, [ROOT / f"tests/native/{name}.cpp", csrc / source], optimise.split(), csrc)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
