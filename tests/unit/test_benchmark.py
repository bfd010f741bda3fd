"""Does the benchmark measure what it says, and refuse what it cannot?"""

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep.reference import reference_combine, reference_dispatch

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_moe_ep_comm.py"
CPU = torch.device("cpu")
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
        command, capture_output=True, text=True, timeout=280, check=False, env=environment
    )


Module = Callable[[str], Any]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """Imports a module of the benchmark, as the benchmark does."""
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    return importlib.import_module


@pytest.mark.slow
@pytest.mark.multirank
def test_every_backend_and_memcpy_are_timed_in_one_run(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    backends = ["cake", "nvlink_one_sided", "nvlink_two_sided", "torch_dist"]
    how = ["--routing", "balanced", "--iterations", "5", "--backends", ",".join(backends)]
    result = run_benchmark(*TINY, *how, "--json", str(out))
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(out.read_text())
    assert document["machine"]["torch"] == torch.__version__
    (case,) = document["cases"]
    # 2 ranks x 3 tokens, each read once and, balanced, written to both ranks: rows of 80 bytes.
    assert case["physical_bytes"] == {"dispatch": 6 * 3 * 80, "combine": 6 * 3 * 80}
    assert [record["backend"] for record in case["figures"]] == [*backends, "memcpy"]
    for record in case["figures"]:
        assert record["rounds"] >= 5
        assert 0 < record["round_us"]["median"] <= record["round_us"]["p99"]
        assert record["backend"] in result.stdout


def test_an_unknown_backend_is_refused_with_the_names_there_are() -> None:
    result = run_benchmark("--backends", "cake,pigeon")
    assert result.returncode == 2
    known = "cake,nvlink_one_sided,nvlink_two_sided,torch_dist"
    assert f"pigeon unknown; there are {known}" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_cuda_is_refused_where_there_is_none() -> None:
    result = run_benchmark("--device", "cuda")
    assert result.returncode == 2
    assert "finds no CUDA device here; use --device cpu" in result.stderr


def test_sizes_that_the_library_refuses_are_refused_before_ranks_start() -> None:
    result = run_benchmark("--num-experts", "4", "--top-k", "8")
    assert result.returncode == 2
    assert "top_k must not exceed num_experts=4, got 8" in result.stderr


@pytest.mark.slow
@pytest.mark.multirank
def test_settings_run_against_each_other_on_several_numbers_of_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--hidden-size", "40", "--tokens", "3", "--num-experts", "4", "--top-k", "2"]
    backends = "cake,cake:copy:mask:stats,cake:fp8-dispatch:fp8-combine"
    result = run_benchmark(
        *["--ranks", "1", "2", *sizes, "--backends", backends],
        *["--iterations", "5", "--dispatch-format", "mxfp8", "--json", str(out)],
    )
    assert result.returncode == 0, result.stderr
    cases = json.loads(out.read_text())["cases"]
    assert [case["ranks"] for case in cases] == [1, 2]
    for case in cases:
        first, second, third, _ = case["figures"]
        assert third["gb_per_s"] * third["round_us"]["median"] < (
            first["gb_per_s"] * first["round_us"]["median"]
        )
        assert [first["settings"]["zero_copy"], second["settings"]["zero_copy"]] == [True, False]
        assert first["times_faster_than_baseline"] == 1.0


@pytest.mark.slow
@pytest.mark.multirank
def test_a_rank_that_fails_ends_all_with_its_message() -> None:
    result = run_benchmark(*TINY, "--backends", "cake", "--threads", "1", "--seed", str(2**70))
    assert result.returncode == 1
    assert "a rank failed, and the others were ended" in result.stderr
    assert "Overflow" in result.stderr


@pytest.mark.parametrize(
    ("backends", "message"),
    [
        ("cake:no-pdl", "cake:no-pdl: only with --device cuda"),
        ("cake:pigeon", "cake:pigeon: pigeon unknown; there are graph,"),
    ],
)
def test_settings_that_do_not_apply_are_refused(backends: str, message: str) -> None:
    result = run_benchmark("--backends", backends)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize("dispatch_format", ["none", "deepseek_fp8", "mxfp8", "nvfp4"])
def test_the_checks_accept_the_oracle_and_nothing_else(
    module: Module, dispatch_format: str
) -> None:
    case = make_case(module, ranks=3, dispatch_format=dispatch_format)
    work = [module("workload").Workload(case, rank, CPU) for rank in range(3)]
    ids = [one.topk_ids for one in work]
    scales = None if dispatch_format == "none" else [one.hidden_states_scale for one in work]
    received = reference_dispatch(
        case.params,
        3,
        [one.hidden_states for one in work],
        ids,
        [one.topk_weights for one in work],
        hidden_states_scale=scales,
    )
    partial = [torch.zeros(3 * case.tokens, case.hidden_size).bfloat16() for _ in work]
    for one, what, into in zip(work, received, partial, strict=True):
        one.check_dispatch(what)
        one.evaluate_experts(into)
    in_fp8, combined = (
        reference_combine(
            case.params,
            3,
            ids,
            partial,
            tokens_per_rank=case.tokens,
            use_low_precision_combine=low,
        )
        for low in (True, False)
    )
    for one, rows, rows_in_fp8 in zip(work, combined, in_fp8, strict=True):
        one.check_combine(rows)
        one.check_combine(rows_in_fp8, fp8_combine=True)
        with pytest.raises(AssertionError, match="combined rows"):
            one.check_combine(rows_in_fp8)

    received[0].hidden_states.view(torch.uint8)[0, 0] ^= 1
    with pytest.raises(AssertionError, match=r"rows received from rank 0: .* 1 bytes differ"):
        work[0].check_dispatch(received[0])
    combined[1].view(torch.uint8)[2, 3] ^= 1
    with pytest.raises(AssertionError, match=r"1 bytes differ, the first at \(2, 3\)"):
        work[1].check_combine(combined[1])


def test_link_bytes_are_those_of_the_busiest_gpu(module: Module) -> None:
    # Balanced, top 2 of 4 experts: each of the 2 x 4 tokens goes to both ranks, a GPU each. So 4
    # rows leave each GPU in dispatch and 4 in combine.
    case = make_case(module, ranks=2, gpus=2, num_experts=4, top_k=2, routing="balanced")
    work = module("workload").Workload(case, 0, CPU)
    assert work.link_bytes() == 8 * 40 * 2
    assert work.link_bytes(fp8_combine=True) == 4 * 40 * 2 + 4 * (40 + 4)
    one_gpu = make_case(module, ranks=2, gpus=1, num_experts=4, top_k=2, routing="balanced")
    assert module("workload").Workload(one_gpu, 0, CPU).link_bytes() == 0


def test_nobody_leaves_the_barrier_before_the_last_has_come(module: Module, tmp_path: Path) -> None:
    barrier = module("places").SpinBarrier
    path = tmp_path / "barrier"
    path.write_bytes(bytes(barrier.file_bytes(2)))
    left: list[int] = []
    with barrier(path, 0, 2) as first, barrier(path, 1, 2) as second:

        def wait_twice() -> None:
            for turn in range(2):
                first.wait()
                left.append(turn)

        thread = threading.Thread(target=wait_twice)
        thread.start()
        thread.join(0.05)
        assert left == []
        second.wait()
        deadline = time.monotonic() + 30
        while not left and time.monotonic() < deadline:
            time.sleep(0.001)
        thread.join(0.05)
        assert left == [0]
        second.wait()
        thread.join()
    assert left == [0, 1]


def make_case(module: Module, **settings: Any) -> Any:
    sizes = {"gpus": 0, "dtype": "bf16", "dispatch_format": "none", "hidden_size": 40, "tokens": 4}
    routing = {"num_experts": 7, "top_k": 3, "routing": "random", "seed": 0}
    return module("workload").Case(**{**sizes, **routing, **settings})
