"""Does a one-sided backend give the same bits with torch's thread pool as with one thread?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_ep import BootstrapConfig, MoEEpCommParams, create_communication
from tests.backends import one_sided_names
from tests.bits import assert_same_bits


@pytest.fixture(params=[1, 4])
def torch_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@one_sided_names
def test_rounds_of_many_tokens_are_exact_with_any_number_of_threads(
    torch_threads: int, backend: str
) -> None:
    g = torch.Generator().manual_seed(torch_threads)
    params = MoEEpCommParams(8, 3, 700, 333)
    with create_communication(BootstrapConfig(1, 0, device="cpu"), params, backend) as comm:
        for num_tokens in (700, 1, 16, 17, 333, 0):
            rows = torch.randn(num_tokens, 333, generator=g).bfloat16()
            ids = torch.randint(-3, 8, (num_tokens, 3), generator=g)
            goes = (ids >= 0).any(1, keepdim=True)
            received = comm.dispatch(rows, ids)
            sent = rows[goes[:, 0]]
            assert_same_bits(received.hidden_states[: len(sent)], sent, rank=0, what="rows")
            combined = comm.combine(received.hidden_states)
            wanted = torch.where(goes, rows, 0) + torch.zeros(())
            assert_same_bits(combined, wanted.bfloat16(), rank=0, what="combined")
