"""Do ranks find each other, and share memory, with what a container leaves them?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.ranks.contained import DONE

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
AS_ROOT = ("unshare", "--user", "--map-root-user", "--mount")
AS_USER = ("unshare", "--user", "--map-user=1000")
SMALL_SHM = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
READ_ONLY = """
cut -d' ' -f2 /proc/self/mounts | sort -ru | while read -r place; do
  mount -o remount,bind,ro "$place" 2>/dev/null
done
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("WORLD_SIZE" in os.environ, reason="starts ranks of its own"),
]


@cache
def reason_against(namespaces: tuple[str, ...], setup: str) -> str | None:
    """Return why this machine cannot play such a container, or None."""
    if not namespaces:
        return None
    if shutil.which(namespaces[0]) is None:
        return "needs unshare of util-linux"
    tried = subprocess.run(
        [*namespaces, "sh", "-c", setup or "true"], capture_output=True, text=True, check=False
    )
    return None if tried.returncode == 0 else f"namespaces are refused here: {tried.stderr.strip()}"


@pytest.mark.parametrize(
    ("restriction", "namespaces", "setup"),
    [
        ("no_ptrace", (), ""),
        ("seccomp", (), ""),
        ("small_shm", AS_ROOT, SMALL_SHM),
        ("read_only", AS_ROOT, READ_ONLY),
        ("ordinary_user", AS_USER, ""),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_ranks_play_in_a_container(
    restriction: str, namespaces: tuple[str, ...], setup: str
) -> None:
    reason = reason_against(namespaces, setup)
    if reason is not None:
        pytest.skip(reason)
    program = f'{setup}\nexec "{sys.executable}" -m tests.ranks.contained {RANKS} {restriction}'
    result = subprocess.run(
        [*namespaces, "sh", "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(DONE) == RANKS
