"""Do the warps of the two-sided CUDA kernels end, whatever CTAs run, and order what they must? As
threads, watched by the sanitizers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.native.native_program import ROOT, build_threads, run

pytestmark = pytest.mark.timeout(600)  # a busy machine may compile for minutes


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_rounds_with_few_ctas_are_exact_and_clean(tmp_path: Path, sanitizer: str) -> None:
    program = tmp_path / "two_sided_channels"
    build_threads("two_sided", ROOT / "csrc", program, sanitizer, "channels")
    wraps = 2**32 - 20
    for ranks, rounds, first in ((1, 8, 0), (2, 8, wraps), (3, 8, wraps), (7, 2, wraps)):
        result = run(program, ranks, rounds, first)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "every element right" in result.stdout


PLANTED = {
    "heads and tails without a release": (
        ("core/atomics.h", "store(value, kRelease)", "store(value, std::memory_order_relaxed)"),
        "data race",
    ),
    "heads in front of their fence": (
        ("two_sided/roles/send_tokens.h", "    m_.fence();\n    for (int w", "    for (int w"),
        "a post without a fence behind what it releases",
    ),
    "looks that no fence is behind": (
        ("two_sided/roles/receive_slots.h", "        m_.fence();\n", ""),
        "data race",
    ),
    "loads over those that are under way": (
        ("two_sided/roles/send_rows.h", "        if (held >= 0) m_.drop_load();\n", ""),
        "a load over one that is under way",
    ),
    "loads that are left under way": (
        (
            "two_sided/roles/send_tokens.h",
            "      if (!await_room(walk, token)) {\n        m_.drop_load();",
            "      if (head_[0] % 64 == 63 || !await_room(walk, token)) {",
        ),
        "a warp that ends with a load under way",
    ),
    "slots filled that are full": (
        ("two_sided/channels.h", "head - tail < static", "head - tail <= static"),
        ": wrong ",
    ),
    "a slot that is freed before it is read": (
        (
            "two_sided/roles/sum_tokens.h",
            "m_.sum_rows(item, token, m_.row_list(), count, [&] {",
            "free_slots(walk, token);\n"
            "m_.sum_rows(item, token, m_.row_list(), count, [] {}); ([&] {",
        ),
        "data race",
    ),
    "blocks that begin elsewhere at their owner": (
        (
            "two_sided/roles/peer_rows.h",
            "end_[w] = bounds[item.end_bound];",
            "end_[w] = bounds[item.first_bound];",
        ),
        "a wait did not end",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(tmp_path: Path, bug: str) -> None:
    (file, right, wrong), found = PLANTED[bug]
    csrc = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    text = (csrc / file).read_text()
    assert right in text
    (csrc / file).write_text(text.replace(right, wrong))
    program = tmp_path / "two_sided_channels"
    build_threads("two_sided", csrc, program, "thread", "channels")
    result = run(program, 4, 8, patience=4)
    assert result.returncode != 0
    assert found in result.stdout + result.stderr
