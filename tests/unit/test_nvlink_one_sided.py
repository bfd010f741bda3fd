"""Which steps go over the Lamport transport of nvlink_one_sided, and which settings are wrong?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ep import MoEEpCommParams, MoEEpConfigError, NVLinkOneSidedConfig, _native
from moe_ep._native import Geometry
from moe_ep.cake.config import CakeAlltoAllConfig
from moe_ep.one_sided.workspace import geometry_of

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
PARAMS = MoEEpCommParams(64, 8, 4096, 7168)


def geometry(
    size: int, device: torch.device = CUDA, max_tokens: int = 4096, **given: Any
) -> Geometry:
    params = MoEEpCommParams(64, 8, max_tokens, 7168)
    return geometry_of(params, size, NVLinkOneSidedConfig(**given), device)


def prefers_packets(one: Geometry) -> bool:
    return bool(one.prefers_packets)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 64])
def test_usually_the_steps_are_those_of_cake(size: int) -> None:
    of_cake = geometry_of(PARAMS, size, CakeAlltoAllConfig(), CUDA)
    assert geometry(size).fields() == of_cake.fields()
    assert geometry(size).low_latency_tokens == _native.low_latency_tokens(size, 8, 4096)


@pytest.mark.parametrize(
    ("given", "tokens", "always"),
    [
        ({"lamport": True}, 32, True),
        ({"lamport": True, "lamport_max_tokens": 7}, 7, True),
        ({"lamport_max_tokens": 7}, 7, False),
        ({"lamport_max_tokens": 32}, 32, False),
        ({"lamport": False}, 0, False),
    ],
)
def test_options_say_how_many_tokens_go_as_packets(
    given: dict[str, Any], tokens: int, always: bool
) -> None:
    one = geometry(8, **given)
    assert one.low_latency_tokens == tokens
    assert prefers_packets(one) == always


def test_no_more_tokens_go_as_packets_than_there_can_be() -> None:
    assert geometry(8, max_tokens=5, lamport=True).low_latency_tokens == 5
    assert geometry(8, max_tokens=5, lamport_max_tokens=9).low_latency_tokens == 5


def test_memory_for_packets_is_there_only_where_they_are_sent() -> None:
    never, usual, always = (geometry(8, lamport=lamport) for lamport in (False, None, True))
    row = 2 * PARAMS.hidden_size
    assert usual.segment_bytes - never.segment_bytes >= 8 * 8 * 2 * row
    assert always.segment_bytes - never.segment_bytes >= 8 * 32 * 2 * row
    assert always.segment_bytes - never.segment_bytes < 8 * 32 * 4 * row


@pytest.mark.parametrize(
    "given", [{"lamport": True}, {"lamport": False}, {"lamport_max_tokens": 3}]
)
def test_on_the_cpu_the_options_change_nothing(given: dict[str, Any]) -> None:
    assert geometry(4, CPU, **given).fields() == geometry(4, CPU).fields()


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"lamport": 1}, TypeError, "lamport must be a bool or None, got 1"),
        ({"lamport": "no"}, TypeError, "lamport must be a bool or None, got 'no'"),
        ({"lamport_max_tokens": 0}, MoEEpConfigError, r"lamport_max_tokens must be 1\.\.32, got 0"),
        ({"lamport_max_tokens": 33}, MoEEpConfigError, r"must be 1\.\.32, got 33"),
        ({"lamport_max_tokens": True}, TypeError, "lamport_max_tokens must be an int, got True"),
        ({"lamport_max_tokens": 2.0}, TypeError, "lamport_max_tokens must be an int, got 2.0"),
        (
            {"lamport": False, "lamport_max_tokens": 4},
            MoEEpConfigError,
            "lamport_max_tokens must be None with lamport=False, got 4.*set lamport to None or",
        ),
    ],
)
def test_wrong_settings_are_named(
    given: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        NVLinkOneSidedConfig(**given)
