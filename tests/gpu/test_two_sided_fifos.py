"""Are rounds exact on GPUs whatever the FIFOs are like, and however few CTAs move the rows?

The FIFOs wrap many times in every round. With one CTA a rank every group of channels waits for the
one before it, on all ranks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_ep import MoEEpCommParams, MoEEpDisagreementError, MoEEpDispatchResult, _native
from moe_ep.collectives import TorchDistributedComm
from moe_ep.nvlink_two_sided import kernels
from moe_ep.symmetric_memory import SymmetricMemory
from tests.backends import SHARED_GPUS, Backend, on_each
from tests.conftest import RunOnRanks
from tests.gpu.device_rounds import (
    Received,
    Tokens,
    Verdict,
    expected_sums,
    partial_rows,
    tokens_of,
)
from tests.gpu.recorded import Delays, Recorded
from tests.ranks import RankContext
from tests.ranks.devices import TIMEOUT_SECONDS

pytestmark = pytest.mark.multirank
CAPACITIES = (1, 130, 0, 5, 33, 64)
FIFOS = {
    "one chunk": {"num_channels": 1, "num_slots": 1, "slot_bytes": 16},
    "parts of a line": {"num_channels": 3, "num_slots": 2, "slot_bytes": 128},
    "many rows a slot": {"num_channels": 40, "num_slots": 1, "slot_bytes": 8192},
    "usual": {"num_channels": 128, "num_slots": 2, "slot_bytes": 4096},
    "more channels than a part has chunks": {"num_channels": 600, "num_slots": 4, "slot_bytes": 48},
}
# Rows of whole chunks; odd ones, of bytes that no word divides.
ALL_PARAMS = {
    "whole": MoEEpCommParams(24, 4, max(CAPACITIES), 512),
    "odd": MoEEpCommParams(30, 3, max(CAPACITIES), 77),
    "float32": MoEEpCommParams(64, 8, max(CAPACITIES), 132, torch.float32),
}
two_sided = on_each(devices=SHARED_GPUS, named="nvlink_two_sided")


class Fifos:
    """One rank's part of what `moe_ep.nvlink_two_sided.kernels` does with a workspace."""

    def __init__(
        self,
        context: RankContext,
        params: MoEEpCommParams,
        fifos: dict[str, int],
        max_sm_count: int | None,
    ) -> None:
        """Allocate and initialise it. Collective."""
        assert context.group is not None
        self._context, self._params, self._max_sm_count = context, params, max_sm_count
        self._geometry = kernels.FifoGeometry(
            ep_size=context.size,
            num_experts=params.num_experts,
            top_k=params.top_k,
            max_tokens_per_rank=params.max_tokens_per_rank,
            **fifos,
        )
        comm = TorchDistributedComm(context.group)
        size = kernels.workspace_size_per_rank(self._geometry)
        self._memory = SymmetricMemory.allocate(comm, size, torch.device(context.device))
        self._where = (self._memory.workspace, self._geometry, context.rank)
        kernels.initialize(*self._where)
        context.barrier()  # nobody may signal before everybody has initialised

    def play(self, mine: Tokens, tokens_per_rank: int) -> tuple[Received, Tensor]:
        """Play a round; return what came, and the sums."""
        params = self._params
        fields = [mine.hidden_states, mine.topk_weights]
        widths = [rows.shape[1] * rows.element_size() for rows in (*fields, mine.topk_ids)]
        routing = kernels.prepare(
            *self._where,
            mine.topk_ids,
            widths,
            has_weights=True,
            tokens_per_rank=tokens_per_rank,
            invalid_expert_id=params.invalid_expert_id,
            timeout_sec=TIMEOUT_SECONDS,
        )
        fields.append(routing.topk_ids)
        rows = self._context.size * tokens_per_rank
        received = [field.new_empty((rows, field.shape[1])) for field in fields]
        how = {"timeout_sec": TIMEOUT_SECONDS, "max_sm_count": self._max_sm_count}
        kernels.alltoallv(*self._where, fields, routing, received, **how)
        got = Received.copied(self._sanitized(received, routing.recv_counts, tokens_per_rank))
        partial = partial_rows(params, self._context.size, self._context.rank, got)
        return got, kernels.combine(*self._where, partial, routing, **how)

    def _sanitized(
        self, received: list[Tensor], counts: Tensor, tokens_per_rank: int
    ) -> MoEEpDispatchResult:
        hidden_states, weights, ids = received
        by_source = ids.view(self._context.size, tokens_per_rank, self._params.top_k)
        torch.ops.moe_ep.sanitize_expert_ids(by_source, counts, self._params.invalid_expert_id)
        return MoEEpDispatchResult(
            hidden_states=hidden_states,
            topk_ids=ids,
            topk_weights=weights,
            tokens_per_rank=tokens_per_rank,
            hidden_states_scale=None,
            eplb_gathered_stats=None,
            recv_token_counts=counts,
        )

    def check(self) -> None:
        kernels.check(*self._where)

    def close(self) -> None:
        self._context.barrier()
        kernels.forget(*self._where)
        self._memory.close()


def play_through(
    context: RankContext,
    params: MoEEpCommParams,
    fifos: dict[str, int],
    max_sm_count: int | None,
    replays: int,
) -> None:
    """Body: rounds of all capacities eagerly, then replays of their graph, with delays between."""
    size, rank, device = context.size, context.rank, torch.device(context.device)
    workspace = Fifos(context, params, fifos, max_sm_count)
    sent = [
        [tokens_of(params, stamp, s, max(most - s % 3, 0), device) for s in range(size)]
        for stamp, most in enumerate(CAPACITIES)
    ]
    wanted = [expected_sums(params, size, tokens[rank]) for tokens in sent]
    verdict = Verdict(params, size, rank, len(sent), device)
    delays = Delays(rank, device)

    def play() -> None:
        for index, most in enumerate(CAPACITIES):
            received, combined = workspace.play(sent[index][rank], most)
            verdict.judge_dispatch(index, received, sent[index])
            verdict.judge_sums(index, combined, wanted[index])

    play()
    workspace.check()
    verdict.require()
    recorded = Recorded(device, play)
    for _ in range(replays):
        delays.maybe(0.5, 30, 1000)
        recorded.replay()
    workspace.check()
    verdict.require()
    workspace.close()


@two_sided
@pytest.mark.parametrize("max_sm_count", [None, 1], ids=["all", "one CTA"])
@pytest.mark.parametrize("fifos", FIFOS)
@pytest.mark.parametrize(("size", "rows"), [(2, "odd"), (4, "whole"), (8, "float32"), (4, "odd")])
def test_rounds_are_exact_with_any_fifos(
    ranks: RunOnRanks,
    backend: Backend,
    device: str,
    size: int,
    rows: str,
    fifos: str,
    max_sm_count: int | None,
) -> None:
    ranks(
        size,
        play_through,
        device=device,
        params=ALL_PARAMS[rows],
        fifos=FIFOS[fifos],
        max_sm_count=max_sm_count,
        replays=10,
        seconds=60,
    )


def prepare_differently(context: RankContext, params: MoEEpCommParams) -> tuple[str, bool]:
    """Body: rank 1 announces wider rows; what `check` says, and whether nothing was received and
    summed. The round after it is exact."""
    workspace = Fifos(context, params, FIFOS["usual"], None)
    device = torch.device(context.device)
    sent = [tokens_of(params, 1, source, 5, device) for source in range(context.size)]
    where = workspace._where
    widths = [params.hidden_size * 2 + 2 * (context.rank == 1)]
    routing = kernels.prepare(*where, sent[context.rank].topk_ids, widths, tokens_per_rank=5)
    rows = torch.zeros(5, widths[0] // 2, dtype=torch.bfloat16, device=device)
    received = rows.new_empty((5 * context.size, rows.shape[1]))
    kernels.alltoallv(*where, [rows], routing, [received])
    sums = received.new_zeros(5, rows.shape[1])
    said = ""
    try:
        kernels.combine(*where, received, routing, output=sums)
        kernels.check(*where)
    except MoEEpDisagreementError as problem:
        said = str(problem)
    torch.cuda.synchronize(device)
    nothing = bool((routing.recv_counts == 0).all()) and bool(sums.isnan().all())
    verdict = Verdict(params, context.size, context.rank, 1, device)
    got, combined = workspace.play(sent[context.rank], 5)
    verdict.judge_dispatch(0, got, sent)
    verdict.judge_sums(0, combined, expected_sums(params, context.size, sent[context.rank]))
    workspace.check()
    verdict.require()
    workspace.close()
    return said, nothing


@two_sided
def test_ranks_that_prepare_different_rows_all_learn_of_it_and_go_on(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    params = ALL_PARAMS["odd"]
    for said, nothing in ranks(3, prepare_differently, device=device, params=params):
        assert "rank 0: tokens_per_rank=5" in said
        assert "row bytes 154" in said
        assert "row bytes 156" in said
        assert nothing


def test_channels_and_slots_that_kernels_cannot_have_are_refused() -> None:
    with pytest.raises(ValueError, match="num_channels must be in"):
        _native.FifoGeometry(
            ep_size=2,
            num_experts=4,
            top_k=2,
            max_tokens_per_rank=8,
            num_slots=2,
            slot_bytes=64,
            num_channels=1025,
        )
