"""A workspace without a communication: one group initialises it for one geometry after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_ep import MoEEpCommParams, MoEEpDispatchResult
from moe_ep._native import Geometry
from moe_ep.collectives import TorchDistributedComm
from moe_ep.symmetric_memory import SymmetricMemory
from tests.backends import named
from tests.gpu.device_rounds import Received, Tokens, partial_rows
from tests.ranks import RankContext
from tests.ranks.devices import TIMEOUT_SECONDS


class BareWorkspace:
    """The memory of a group, and one rank's part of what a backend's `kernels` do with it."""

    def __init__(self, context: RankContext, backend: str, memory: SymmetricMemory) -> None:
        self._kernels = named(backend).kernels
        self._context = context
        self._memory = memory
        self._geometry: Geometry | None = None

    @property
    def device(self) -> torch.device:
        return self._memory.device

    def start(self, geometry: Geometry) -> None:
        """Initialise it for rounds of a geometry. Collective, between rounds."""
        self.settle()
        self._kernels.initialize(self._memory.workspace, geometry, self._context.rank)
        self._geometry = geometry
        self._context.barrier()  # nobody may signal before everybody has initialised

    def settle(self) -> None:
        """Return when all rounds of all ranks are over; raise what this rank's have recorded."""
        if self._geometry is not None:
            self._kernels.check(self._memory.workspace, self._geometry, self._context.rank)
        self._context.barrier()

    def play(
        self,
        params: MoEEpCommParams,
        mine: Tokens,
        tokens_per_rank: int,
        *,
        zero_copy: bool,
        low_precision: bool = False,
        eplb_local_stats: Tensor | None = None,
    ) -> tuple[Received, Tensor, Tensor | None]:
        """Play a round; return copies of what came, the sums, and the statistics."""
        assert self._geometry is not None
        where = (self._memory.workspace, self._geometry, self._context.rank)
        got = self._kernels.dispatch(
            *where,
            mine.topk_ids,
            [mine.hidden_states],
            mine.topk_weights,
            tokens_per_rank=tokens_per_rank,
            invalid_expert_id=params.invalid_expert_id,
            eplb_local_stats=eplb_local_stats,
            timeout_sec=TIMEOUT_SECONDS,
        )
        received = Received.copied(
            MoEEpDispatchResult(
                hidden_states=got.payloads[0],
                topk_ids=got.topk_ids,
                topk_weights=got.topk_weights,
                tokens_per_rank=tokens_per_rank,
                hidden_states_scale=None,
                eplb_gathered_stats=None,
                recv_token_counts=got.recv_token_counts,
            )
        )
        stats = None if got.eplb_gathered_stats is None else got.eplb_gathered_stats.clone()
        partial = partial_rows(params, self._context.size, self._context.rank, received)
        if zero_copy:
            row = (params.hidden_size, params.token_dtype)
            buffer = self._kernels.combine_input_buffer(*where, tokens_per_rank, *row)
            partial = buffer.copy_(partial)
        num_tokens = len(mine.topk_ids)
        combined = self._kernels.combine(
            *where,
            partial,
            num_tokens,
            timeout_sec=TIMEOUT_SECONDS,
            use_low_precision_combine=low_precision,
        )
        assert isinstance(combined, Tensor)
        return received, combined, stats

    def forget(self) -> None:
        """Let go of what the process keeps about it."""
        if self._geometry is not None:
            self._kernels.forget(self._memory.workspace, self._geometry, self._context.rank)
            self._geometry = None


@contextmanager
def bare_workspace(
    context: RankContext, backend: str, segment_bytes: int
) -> Iterator[BareWorkspace]:
    """Memory of `segment_bytes` on each rank; enough for any geometry that needs no more.
    Collective.
    """
    assert context.group is not None
    comm = TorchDistributedComm(context.group)
    memory = SymmetricMemory.allocate(comm, segment_bytes, torch.device(context.device))
    workspace = BareWorkspace(context, backend, memory)
    try:
        yield workspace
    finally:
        workspace.forget()
        memory.close()
