"""Does the benchmark measure what it says, and refuse what it cannot?"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_moe_ep_comm.py"
TINY = [
    "--ranks",
    "2",
    "--hidden-size",
    "40",
    "--tokens",
    "3",
    "--num-experts",
    "4",
    "--top-k",
    "2",
]


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *arguments]
    # The checkout's library, whether it is installed or not.
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARK.parents[1])}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=environment
    )


@pytest.mark.slow
@pytest.mark.multirank
def test_every_backend_and_memcpy_are_timed_in_one_run(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run_benchmark(*TINY, "--routing", "balanced", "--iterations", "5", "--json", str(out))
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(out.read_text())
    assert document["machine"]["torch"] == torch.__version__
    (case,) = document["cases"]
    # 2 ranks x 3 tokens, each read once and, balanced, written to both ranks: rows of 80 bytes.
    assert case["physical_bytes"] == {"dispatch": 6 * 3 * 80, "combine": 6 * 3 * 80}
    assert [record["backend"] for record in case["figures"]] == ["cake", "torch_dist", "memcpy"]
    for record in case["figures"]:
        assert record["rounds"] >= 5
        assert 0 < record["round_us"]["median"] <= record["round_us"]["p99"]
        assert record["backend"] in result.stdout


def test_an_unknown_backend_is_refused_with_the_names_there_are() -> None:
    result = run_benchmark("--backends", "cake,pigeon")
    assert result.returncode == 2
    assert "pigeon unknown; there are cake,torch_dist" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_cuda_is_refused_where_there_is_none() -> None:
    result = run_benchmark("--device", "cuda")
    assert result.returncode == 2
    assert "finds no CUDA device here; use --device cpu" in result.stderr


def test_sizes_that_the_library_refuses_are_refused_before_ranks_start() -> None:
    result = run_benchmark("--num-experts", "4", "--top-k", "8")
    assert result.returncode == 2
    assert "top_k must not exceed num_experts=4, got 8" in result.stderr
