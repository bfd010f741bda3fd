"""Do an import and a round of eager code load and start no more than they need?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    "order",
    ["import moe_ep; begin(); import torch._dynamo", "begin(); import moe_ep"],
    ids=["moe_ep, group, compiler", "group, moe_ep"],
)
def test_no_thread_of_gloo_outlives_a_group_in_which_modules_are_loaded(order: str) -> None:
    """It could abort the exit."""
    program = f"""
import os, torch, torch.distributed as dist
def begin():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
{order}
dist.destroy_process_group()
threads = [open(f"/proc/self/task/{{t}}/comm").read() for t in os.listdir("/proc/self/task")]
print([name for name in threads if "gloo" in name])
"""
    assert output_of(program) == "[]"


@pytest.mark.parametrize("backend", ["cake", "nvlink_one_sided", "nvlink_two_sided", "torch_dist"])
def test_an_eager_round_does_not_load_the_compiler(backend: str) -> None:
    """Besides the second that it takes: torch 2.14's keeps the default process group of the moment
    when it is loaded, whose threads then outlive `destroy_process_group` and can abort the exit.
    """
    program = f"""
import sys, torch
from moe_ep import BootstrapConfig, MoEEpCommParams, create_communication
rows, ids = torch.ones(3, 8).bfloat16(), torch.tensor([[0, 1]] * 3)
params = MoEEpCommParams(num_experts=4, top_k=2, max_tokens_per_rank=4, hidden_size=8)
with create_communication(BootstrapConfig(1, 0, device="cpu"), params, "{backend}") as comm:
    comm.combine(comm.dispatch(rows, ids).hidden_states)
print("torch._dynamo" in sys.modules)
"""
    assert output_of(program) == "False"
