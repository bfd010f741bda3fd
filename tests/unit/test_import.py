"""Does an import stay harmless?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def output_of(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_an_import_needs_no_gpu_and_initialises_none() -> None:
    program = "import moe_ep, moe_ep.cake.kernels, torch; print(torch.cuda.is_initialized())"
    assert output_of(program) == "False"


def test_an_import_starts_no_thread_and_no_process_group() -> None:
    program = """
import torch
import torch.distributed
before = len(__import__("os").listdir("/proc/self/task"))
import moe_ep, moe_ep.cake.kernels
after = len(__import__("os").listdir("/proc/self/task"))
print(after - before, torch.distributed.is_initialized())
"""
    assert output_of(program) == "0 False"
