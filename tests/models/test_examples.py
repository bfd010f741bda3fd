"""Do the examples that torchrun starts pass their own checks, and do these see what is wrong?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
AT_EXIT = Path(__file__).parent / "at_exit"

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.skipif("WORLD_SIZE" in os.environ, reason="starts ranks of its own"),
]


def run(name: str, ranks: int, *arguments: str, wrong: str = "") -> tuple[int, str]:
    """Return an example's exit code and what it printed. wrong: code that first breaks it.

    Fails where Python ends with threads of Gloo, which could abort a process.
    """
    script = str(EXAMPLES / name)
    if wrong:
        launch = f"import sys, runpy; sys.path.insert(0, {str(EXAMPLES)!r}); {wrong}; "
        launch += f"sys.argv[0] = {script!r}; runpy.run_path({script!r}, run_name='__main__')"
        command = ["--no-python", sys.executable, "-c", launch, *arguments]
    else:
        command = [script, *arguments]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    modules = os.pathsep.join((str(AT_EXIT), str(EXAMPLES.parent)))
    environment = {"PYTHONPATH": modules, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [*start, f"--nproc-per-node={ranks}", *command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=110,
        check=False,
    )
    assert "threads of Gloo" not in process.stderr, process.stderr
    return process.returncode, process.stdout + process.stderr


SHORT = ("--steps=4", "--checked=4", "--sequences=6", "--sample=4")


def test_training_on_a_mesh_of_two_by_two_is_that_of_one_process() -> None:
    code, printed = run("train_moe_lm.py", 4, "--ep-size=2", *SHORT)
    assert code == 0, printed
    assert "PASS: the losses of 4 ranks (2 x 2)" in printed
    assert "The statement " in printed


def test_training_sees_a_gradient_that_is_left_out() -> None:
    forgets = "import moe_lm.training as t; t.all_reduce = lambda parameters, group: None"
    code, printed = run("train_moe_lm.py", 2, *SHORT, wrong=forgets)
    assert code == 1, printed
    assert "FAIL: the losses of 2 ranks" in printed


def test_all2all_manager_is_exact() -> None:
    code, printed = run("all2all_manager.py", 2)
    assert code == 0, printed
    assert "PASS: rank 0 of 2, 3 layers" in printed
    assert "PASS: rank 1 of 2, 3 layers" in printed
