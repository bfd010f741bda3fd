"""Is it seen that a process has ended, at whatever moment that happens?"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.native.native_program import ROOT, build


def test_a_process_may_end_while_it_is_asked_about(tmp_path: Path) -> None:
    csrc, program = ROOT / "csrc", tmp_path / "process_identity"
    sources = [ROOT / "tests/native/process_identity.cpp", csrc / "core/process_identity.cpp"]
    build(program, sources, ["-O1"], csrc)
    result = subprocess.run([program], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout
