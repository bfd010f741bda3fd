"""Is it told right whether all that is made of a tensor goes into the next combine?"""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, Node

import moe_ep.ops  # noqa: F401  (loads the ops)
from moe_ep.done_with import goes_into

OPS, ATEN = torch.ops.moe_ep, torch.ops.aten
DISPATCH, COMBINE = OPS.cake_dispatch.default, OPS.cake_combine.default
ROWS, CHECK = OPS.cake_received_rows.default, OPS.cake_check.default


class Round:
    """A graph with a workspace, and what one dispatch has brought."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.workspace = self.graph.placeholder("workspace")
        self.dispatched = self.call(DISPATCH, self.workspace)
        self.rows = self.call(ROWS, self.workspace)

    def call(self, target: Callable[..., object], *args: object) -> Node:
        return self.graph.call_function(target, args)

    def combine(self, *args: Node) -> Node:
        return self.call(COMBINE, self.workspace, *args)

    def rows_go_into_combine(self) -> bool:
        return goes_into(self.rows, [COMBINE], [ROWS])


def doubled(one: Round) -> Node:
    return one.call(ATEN.mul.Tensor, one.rows, 2)


def through_an_op(one: Round) -> None:
    one.combine(doubled(one))


def as_they_are(one: Round) -> None:
    one.combine(one.rows)


def nowhere(one: Round) -> None:
    one.combine()


def through_a_view_and_an_item(one: Round) -> None:
    parts = one.call(ATEN.split.Tensor, one.rows, 2)
    first, _unused = (one.call(operator.getitem, parts, i) for i in range(2))
    one.combine(first)


def with_another_round_behind(one: Round) -> None:
    one.combine(doubled(one))
    one.call(DISPATCH, one.workspace)
    late = one.call(ROWS, one.workspace)
    one.graph.output((late,))


def used_behind(one: Round) -> None:
    one.call(ATEN.add.Tensor, one.combine(doubled(one)), one.rows)


def made_before_used_behind(one: Round) -> None:
    twice = doubled(one)
    one.call(ATEN.add.Tensor, one.combine(twice), twice)


def returned(one: Round) -> None:
    one.combine(doubled(one))
    one.graph.output((one.rows,))


def leading_nowhere(one: Round) -> None:
    """It may have an effect, and its place is not tied to combine's."""
    one.call(ATEN._assert_async.default, one.rows)
    one.combine(doubled(one))


def written_to(one: Round) -> None:
    one.combine(one.call(ATEN.mul_.Tensor, one.rows, 2))


def written_elsewhere(one: Round) -> None:
    buffer = one.call(ATEN.empty_like.default, one.workspace)
    one.combine(one.call(ATEN.copy_.default, buffer, one.rows))


def into_what_is_no_op(one: Round) -> None:
    one.combine(one.call(torch.cond, one.rows))


def without_a_combine(one: Round) -> None:
    doubled(one)


def before_another_op_on_the_workspace(one: Round) -> None:
    one.call(CHECK, one.workspace)
    one.combine(doubled(one))


GO_INTO = [
    through_an_op,
    as_they_are,
    nowhere,
    through_a_view_and_an_item,
    with_another_round_behind,
]
DO_NOT = [
    used_behind,
    made_before_used_behind,
    returned,
    leading_nowhere,
    written_to,
    written_elsewhere,
    into_what_is_no_op,
    without_a_combine,
    before_another_op_on_the_workspace,
]


@pytest.mark.parametrize("build", GO_INTO)
def test_all_that_is_made_of_it_goes_into_combine(build: Callable[[Round], None]) -> None:
    one = Round()
    build(one)
    assert one.rows_go_into_combine()


@pytest.mark.parametrize("build", DO_NOT)
def test_not_all_that_is_made_of_it_goes_into_combine(build: Callable[[Round], None]) -> None:
    one = Round()
    build(one)
    assert not one.rows_go_into_combine()


def test_of_a_clone_nothing_is_said() -> None:
    one = Round()
    clone = one.call(ATEN.clone.default, one.workspace)
    rows = one.call(ROWS, clone)
    one.call(COMBINE, clone, rows)
    assert not goes_into(rows, [COMBINE], [ROWS])
