"""The examples run as a user runs them, and the check inside tells right logits from wrong ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
AT_EXIT = Path(__file__).parent / "at_exit"
sys.path.insert(0, str(EXAMPLES))

from hf_moe import options, places  # noqa: E402
from hf_moe.check import ROUTER_TIE, TOLERANCE, compare_logits  # noqa: E402

needs_transformers = pytest.mark.skipif(
    options.problem_with_packages() is not None, reason=str(options.problem_with_packages())
)
starts_ranks = pytest.mark.skipif(
    int(os.environ.get("WORLD_SIZE", "1")) > 1, reason="starts ranks of its own"
)


def run_example(name: str, *arguments: str) -> str:
    """The example's standard output; fails with all that it printed if its exit code is not 0, or
    if Python ends with threads of Gloo, which could abort a process.
    """
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(AT_EXIT), str(EXAMPLES.parent)))},
        check=False,
    )
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    assert "threads of Gloo" not in process.stderr, process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf_moe_inference")


def run_small_model(*, backend: str, ranks: int, device: str, cache: Path) -> str:
    return run_example(
        "hf_moe_inference.py",
        f"--backend={backend}",
        f"--ranks={ranks}",
        "--layers=2",
        "--tokens=16",
        "--repeats=1",
        f"--device={device}",
        f"--cache={cache}",
    )


@needs_transformers
@starts_ranks
@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.timeout(600)
# That backends give the same bits on any number of ranks is what the contract's tests show.
@pytest.mark.parametrize(("ranks", "backend"), [(2, "torch_dist"), (4, "cake")])
def test_expert_parallel_model_gives_the_logits_of_one_process(
    backend: str, ranks: int, model_cache: Path
) -> None:
    printed = run_small_model(backend=backend, ranks=ranks, device="cpu", cache=model_cache)
    last_line = printed.splitlines()[-1]
    assert last_line == (
        f"PASS: {ranks} ranks over moe_ep ({backend}) and one process give the same logits"
    )


@needs_transformers
@starts_ranks
@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["cake", "nvlink_one_sided", "torch_dist"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_expert_parallel_model_on_gpus_gives_the_logits_of_one_process(
    backend: str, ranks: int, model_cache: Path
) -> None:
    reason = places.reason_against_gpus(ranks, backend)
    if reason is not None:
        pytest.skip(reason)
    printed = run_small_model(backend=backend, ranks=ranks, device="cuda", cache=model_cache)
    last_line = printed.splitlines()[-1]
    assert last_line == (
        f"PASS: {ranks} ranks over moe_ep ({backend}) and one process give the same logits"
    )


def test_round_trip_passes_in_one_process() -> None:
    assert run_example("round_trip.py").startswith("PASS: rank 0 of 1")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks=3"], "--ranks must be 2 or more and divide the 32 experts, got 3"),
        (["--ranks=1"], "--ranks must be 2 or more and divide the 32 experts, got 1"),
        (["--layers=0"], "--layers must be 1 or more, got 0"),
        (["--tokens=0"], "--tokens must be 1..4096, got 0"),
        (["--tokens=4097"], "--tokens must be 1..4096, got 4097"),
        (["--repeats=0"], "--repeats must be 1 or more, got 0"),
        (["--backend=carrier_pigeon"], "invalid choice: 'carrier_pigeon'"),
        (["--device=tpu"], "invalid choice: 'tpu'"),
        (["--tokens=many"], "invalid int value: 'many'"),
    ],
)
def test_option_that_cannot_work_is_named(
    arguments: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(sys, "argv", ["hf_moe_inference.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        options.parse_options()
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_ranks_must_be_those_that_torchrun_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["hf_moe_inference.py", "--ranks=4"])
    with pytest.raises(SystemExit):
        options.parse_options()
    assert "--ranks is 4, but torchrun started 2" in capsys.readouterr().err


@pytest.fixture
def a_machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with two GPUs that ranks can share. Tests take away what they like."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(places.mps, "daemon_is_running", lambda environment: False)
    monkeypatch.setattr(places.mps, "unavailable_reason", lambda: None)
    monkeypatch.setattr(places.CakeAlltoAll, "unsupported_reason", lambda device: None)
    return monkeypatch


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_take_the_gpus_and_share_them(ranks: int, a_machine: pytest.MonkeyPatch) -> None:
    assert places.reason_against_gpus(ranks, "auto") is None
    a_machine.setattr(sys, "argv", ["hf_moe_inference.py", f"--ranks={ranks}"])
    a_machine.setattr(options, "problem_with_packages", lambda: None)
    assert options.parse_options().device == "cuda"


def test_without_an_mps_daemon_each_rank_needs_a_gpu(a_machine: pytest.MonkeyPatch) -> None:
    a_machine.setattr(places.mps, "unavailable_reason", lambda: "it is not installed")
    assert places.reason_against_gpus(2, "auto") is None
    assert places.reason_against_gpus(4, "auto") == (
        "4 ranks on 2 GPU(s) need an MPS daemon: it is not installed"
    )
    a_machine.setattr(sys, "argv", ["hf_moe_inference.py", "--ranks=4"])
    a_machine.setattr(options, "problem_with_packages", lambda: None)
    assert options.parse_options().device == "cpu"


def test_over_nccl_each_rank_needs_a_gpu(a_machine: pytest.MonkeyPatch) -> None:
    assert places.reason_against_gpus(2, "torch_dist") is None
    assert "NCCL a GPU for each of 4 ranks" in str(places.reason_against_gpus(4, "torch_dist"))


def test_gpus_are_shared_only_where_cake_runs(a_machine: pytest.MonkeyPatch) -> None:
    a_machine.setattr(
        places.CakeAlltoAll, "unsupported_reason", lambda device: f"{device} is too old"
    )
    assert places.reason_against_gpus(2, "auto") is None
    assert places.reason_against_gpus(4, "auto") == "cuda:0 is too old"


def test_launched_ranks_that_share_a_gpu_need_a_daemon_from_outside(
    a_machine: pytest.MonkeyPatch,
) -> None:
    a_machine.setenv("TORCHELASTIC_RUN_ID", "none")
    a_machine.setenv("LOCAL_WORLD_SIZE", "4")
    assert "python tools/mps.py torchrun" in str(places.reason_against_gpus(4, "auto"))
    a_machine.setattr(places.mps, "daemon_is_running", lambda environment: True)
    assert places.reason_against_gpus(4, "auto") is None


def test_rank_enters_its_share_of_its_gpu(a_machine: pytest.MonkeyPatch) -> None:
    a_machine.setenv("TORCHELASTIC_RUN_ID", "none")
    a_machine.setenv("LOCAL_RANK", "3")
    a_machine.setenv("LOCAL_WORLD_SIZE", "4")
    a_machine.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
    made_current: list[torch.device] = []
    a_machine.setattr(torch.cuda, "set_device", made_current.append)
    assert places.enter("cuda") == torch.device("cuda:1")
    assert made_current == [torch.device("cuda:1")]
    assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert os.environ["LOCAL_RANK"] == "1"
    assert places.group_backends("cuda") == "gloo"


# Three tokens, a vocabulary of two, two experts of which one is chosen; no ties.
LOGITS = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]])
ROUTER_LOGITS = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])


def wrong_tokens(logits: torch.Tensor, router_logits: torch.Tensor = ROUTER_LOGITS) -> int:
    return compare_logits(logits, LOGITS, (router_logits,), top_k=1).wrong


def test_equal_logits_are_right() -> None:
    assert wrong_tokens(LOGITS + TOLERANCE / 2) == 0


@pytest.mark.parametrize("value", [1 + 2 * TOLERANCE, float("nan"), float("inf")])
def test_one_wrong_logit_is_one_wrong_token(value: float) -> None:
    logits = LOGITS.clone()
    logits[0, 0, 0] = value
    assert wrong_tokens(logits) == 1


def test_router_tie_excuses_its_token_and_those_behind_but_no_nan() -> None:
    tie = ROUTER_LOGITS.clone()
    tie[1] = torch.tensor([1.0, 1.0 - ROUTER_TIE / 2])
    assert wrong_tokens(LOGITS + 1, tie) == 1
    assert wrong_tokens(LOGITS * torch.nan, tie) == 3
