"""Rounds of dispatch, experts and combine, with which most tests say what they want.

A test states a round for all ranks at once (`inputs`). Each rank plays its part on a real
communication and returns what it got (`playing`); the test compares everything with
`moe_ep.reference` (`oracle`).
"""

from tests.rounds.inputs import Round, ids_of, random_round, random_rows, rows_of
from tests.rounds.oracle import check, check_all, count_matrix, first_column
from tests.rounds.playing import (
    Played,
    copy_of,
    create,
    on_device_of,
    play,
    play_round,
    settled,
)

__all__ = [
    "Played",
    "Round",
    "check",
    "check_all",
    "copy_of",
    "count_matrix",
    "create",
    "first_column",
    "ids_of",
    "on_device_of",
    "play",
    "play_round",
    "random_round",
    "random_rows",
    "rows_of",
    "settled",
]
