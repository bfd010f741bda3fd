"""Do the device's programs compute on a GPU what the host's headers compute?"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tools.mps import without_daemon

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device, found none"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on the PATH"),
]


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("core_headers", "host and device agree"),
        ("combine_rounding", "sums have the bits of the CPU"),
    ],
)
def test_program_finds_no_difference(tmp_path: Path, name: str, verdict: str) -> None:
    program = tmp_path / name
    source = ROOT / f"tests/native/{name}.cu"
    flags = ["-std=c++20", "-O3", "-arch=native", f"-I{ROOT / 'csrc'}"]
    alone = without_daemon(os.environ)
    subprocess.run(["nvcc", *flags, str(source), "-o", str(program)], env=alone, check=True)
    result = subprocess.run([program], env=alone, capture_output=True, text=True)
    if result.returncode == SKIPPED:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout
    assert verdict in result.stdout
