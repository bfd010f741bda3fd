"""Do the headers of csrc/core compute on a GPU what they compute on the host?"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device, found none"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on the PATH"),
]


def test_host_and_device_agree(tmp_path: Path) -> None:
    program = tmp_path / "core_headers"
    source = ROOT / "tests/native/core_headers.cu"
    flags = ["-std=c++20", "-arch=native", f"-I{ROOT / 'csrc'}"]
    subprocess.run(["nvcc", *flags, str(source), "-o", str(program)], check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert "host and device agree" in result.stdout
