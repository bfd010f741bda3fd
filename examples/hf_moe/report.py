"""What rank 0 prints: what runs, how fast, and whether it is right."""

from __future__ import annotations

import argparse
import textwrap

from hf_moe.check import TOLERANCE, Agreement
from hf_moe.clock import PassTimes
from hf_moe.model import english_text, model_config

THROUGH_HOST = """\
Ranks that share a GPU cannot use NCCL: here all_to_all goes over Gloo, through host memory.
"""


def header(options: argparse.Namespace, place: str) -> str:
    """What is about to run, and where."""
    config = model_config(options.layers)
    excerpt = textwrap.shorten(english_text().split("\n\n")[1], 60, placeholder=" ...")
    return f"""\
model  Qwen3-MoE with random float32 weights: {options.layers} layers, hidden size \
{config.hidden_size}, {config.num_experts_per_tok} of {config.num_experts} experts per token
ranks  {options.ranks} processes on {place}, each with \
{config.num_experts // options.ranks} experts of every layer and {options.tokens} tokens of its own
text   Python language reference, "{excerpt}"
"""


def table(
    times: dict[str, PassTimes], options: argparse.Namespace, *, theirs_goes_through_host: bool
) -> str:
    """One line for each way to exchange tokens, ours first.

    theirs_goes_through_host: all_to_all runs over Gloo, though the tokens are on a GPU.
    """
    tokens = options.ranks * options.tokens
    columns = ("forward", "dispatch", "combine", "exchange")
    lines = [
        f"{'exchange by':<25}{'tokens/s':>9}" + "".join(f"{name:>12}" for name in columns),
        *(_line(title, seconds, tokens) for title, seconds in times.items()),
    ]
    ours, theirs = times.values()
    note = THROUGH_HOST if theirs_goes_through_host else ""
    return "\n".join(lines) + (
        f"""
  Times of {tokens:,} tokens on the slowest rank, each the best of {options.repeats}. \
forward: a whole pass;
  dispatch, combine: summed over {options.layers} layers; exchange: their share of the pass.

The exchange of moe_ep is {theirs.exchange / ours.exchange:.1f} times as fast as all_to_all's.
{note}"""
    )


def verdict(agreement: Agreement, what: str) -> str:
    """How `what` compares with one process; the last line is "PASS: ..." or "FAIL: ..."."""
    figures = f"""\
Logits differ from those of one process by at most {agreement.largest_difference:.1e} \
(tolerance {TOLERANCE:.0e}:
float32 sums in another order); {agreement.same_next_token:,} of {agreement.tokens:,} tokens have \
the same most likely next token.
"""
    if agreement.wrong:
        return figures + f"FAIL: {what} and one process differ at {agreement.wrong:,} tokens"
    return figures + f"PASS: {what} and one process give the same logits"


def _line(title: str, seconds: PassTimes, tokens: int) -> str:
    milliseconds = (seconds.forward, seconds.dispatch, seconds.combine)
    return (
        f"{title:<25}{tokens / seconds.forward:>9,.0f}"
        + "".join(f"{1000 * value:>9,.1f} ms" for value in milliseconds)
        + f"{seconds.exchange / seconds.forward:>12.1%}"
    )
