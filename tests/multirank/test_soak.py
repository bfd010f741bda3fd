"""Does anything stale ever show, over thousands of rounds with delays at random places?

MOE_EP_SOAK multiplies the rounds on the CPU: with 16 they are more than 100,000 over all backends.
"""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

from moe_ep import MoEEpCommParams
from moe_ep.cake.kernels import active_rank_mask
from tests.backends import Backend, every_backend, on_each
from tests.conftest import RunOnRanks
from tests.ranks import RankContext
from tests.ranks.devices import CPU
from tests.ranks.processes import PATIENCE_SECONDS
from tests.rounds import create

pytestmark = [pytest.mark.multirank, pytest.mark.slow]
TOKENS, HIDDEN, TOP_K = 6, 48, 3
# On GPUs it is a check of the host's part; tests/gpu/test_soak.py soaks the device's.
SOAK = int(os.environ.get("MOE_EP_SOAK", "1"))
ROUNDS = {"cake": 2000, "nvlink_one_sided": 2000, "nvlink_two_sided": 1000, "torch_dist": 300}
ROUNDS_A_MASK = 30
ROUNDS_ON_GPUS = 150
MAX_DELAY_SECONDS = 0.005


def stamp(index: int, rank: int) -> float:
    """Return a number that only this rank sends in this round, for 2**14 rounds; sums of three are
    exact in float32.
    """
    return float(index % 2**14 * 2**8 + rank)


def soak(context: RankContext, backend: str, rounds: int, masked: bool = False) -> tuple[int, int]:
    """Body: the same ids in every round, a new stamp in every row; return growth of descriptors
    and of resident bytes after the first tenth.

    masked: every ROUNDS_A_MASK rounds other ranks are masked off, and come back.
    """
    rank, size = context.rank, context.size
    params = MoEEpCommParams(2 * size, TOP_K, TOKENS, HIDDEN, torch.float32)
    delays = random.Random(7)  # the same on every rank: one of them sleeps
    counts = [TOKENS - source % 2 for source in range(size)]
    generators = [torch.Generator().manual_seed(source) for source in range(size)]
    ids = [
        torch.randint(0, 2 * size, (n, TOP_K), generator=g, dtype=torch.int32)
        for n, g in zip(counts, generators, strict=True)
    ]
    travels = [
        torch.stack([(owned // 2 == owner).any(dim=1) for owner in range(size)]) for owned in ids
    ]
    active = list(range(size))
    masks = random.Random(8)  # the same on every rank
    before = (0, 0)
    options = {"enable_rank_mask": True} if masked else {}
    with create(context, params, backend, **options) as communication:
        my_ids = ids[rank].to(communication.device)
        for index in range(rounds):
            sleeper, place = delays.randrange(size), delays.randrange(4)
            seconds = delays.uniform(0, MAX_DELAY_SECONDS)
            if index == rounds // 10:
                before = (open_descriptors(), resident_bytes())
            if masked and index % ROUNDS_A_MASK == 0:
                left, active = active, sorted(masks.sample(range(size), masks.randint(1, size)))
                context.barrier()  # nobody is masked off who is still in a round
                if not set(active) <= set(left):
                    communication.reinitialize()
            if rank not in active:
                continue
            mask = {"active_rank_mask": active_rank_mask(active, size)} if masked else {}
            recv_counts = [
                int(travels[source][rank].sum()) if source in active else 0
                for source in range(size)
            ]
            owners = travels[rank] * torch.tensor([r in active for r in range(size)])[:, None]

            def maybe_sleep(
                here: int, sleeper: int = sleeper, place: int = place, seconds: float = seconds
            ) -> None:
                if sleeper == rank and place == here:
                    time.sleep(seconds)

            maybe_sleep(0)
            rows = torch.full((counts[rank], HIDDEN), stamp(index, rank))
            weights = torch.full((counts[rank], TOP_K), stamp(index, rank) + 0.5)
            result = communication.dispatch(
                rows.to(communication.device), my_ids, weights.to(communication.device), **mask
            )
            maybe_sleep(1)
            assert result.recv_token_counts.tolist() == recv_counts, f"round {index}"
            assert result.topk_weights is not None
            blocks = result.hidden_states.cpu().view(size, TOKENS, HIDDEN)
            weight_blocks = result.topk_weights.cpu().view(size, TOKENS, TOP_K)
            id_blocks = result.topk_ids.cpu().view(size, TOKENS, TOP_K)
            partial = torch.full_like(blocks, float("nan"))
            for source, n in enumerate(recv_counts):
                wanted = stamp(index, source)
                where = f"round {index}, rank {rank} from {source}"
                assert (blocks[source, :n] == wanted).all(), f"{where}: {blocks[source, :n]}"
                assert (weight_blocks[source, :n] == wanted + 0.5).all(), where
                sent = ids[source][travels[source][rank]][:n]
                assert id_blocks[source, :n].equal(sent), where
                assert (id_blocks[source, n:] == -1).all(), where
                partial[source, :n] = blocks[source, :n] + rank
            maybe_sleep(2)
            combined = communication.combine(partial.to(communication.device), **mask).cpu()
            owner_sum = (owners * torch.arange(size)[:, None]).sum(dim=0).float()[:, None]
            wanted_sum = owners.sum(dim=0).float()[:, None] * stamp(index, rank) + owner_sum
            assert (combined == wanted_sum).all(), f"round {index}, rank {rank}: {combined}"
            maybe_sleep(3)
        after = (open_descriptors(), resident_bytes())
    return after[0] - before[0], after[1] - before[1]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    """Return what the process has in memory besides files: their pages come and go as the machine
    has room.
    """
    with open("/proc/self/status") as file:
        kilobytes = dict(line.split(maxsplit=2)[:2] for line in file if line.startswith("Rss"))
    return 1024 * (int(kilobytes["RssAnon:"]) + int(kilobytes["RssShmem:"]))


@every_backend
@pytest.mark.timeout(300 * SOAK)
def test_no_round_shows_anything_of_another_and_nothing_grows(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    growth = ranks(
        4,
        soak,
        device=device,
        seconds=PATIENCE_SECONDS * SOAK,
        backend=backend.name,
        rounds=SOAK * ROUNDS[backend.name] if device == CPU else ROUNDS_ON_GPUS,
    )
    assert [descriptors for descriptors, _ in growth] == [0] * 4
    allowed = 2 * 2**20 if device == CPU else 16 * 2**20  # the driver's own books grow in steps
    assert all(memory < allowed for _, memory in growth), growth


@on_each(having="masks")
@pytest.mark.timeout(300 * SOAK)
def test_no_round_shows_anything_of_another_while_ranks_are_masked_off_and_come_back(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    growth = ranks(
        4,
        soak,
        device=device,
        seconds=PATIENCE_SECONDS * SOAK,
        backend=backend.name,
        rounds=SOAK * ROUNDS[backend.name] // 2 if device == CPU else ROUNDS_ON_GPUS,
        masked=True,
    )
    assert [descriptors for descriptors, _ in growth] == [0] * 4


@every_backend
def test_more_ranks_than_cores_keep_in_step(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    rounds = 150 if device == CPU else 50
    ranks(8, soak, device=device, backend=backend.name, rounds=rounds)
