"""A round over inputs that stay where they are, captured in a CUDA graph and replayed with others'
values, and what such a round is compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep import MoEEpCommunication
from tests.gpu.device_rounds import (
    Received,
    Tokens,
    Verdict,
    capturing,
    expected_sums,
    partial_rows,
    tokens_of,
)


def run_round(
    communication: MoEEpCommunication, tokens: Tokens, tokens_per_rank: int, combine_input: str
) -> tuple[Received, Tensor]:
    """Dispatch, experts, combine, without the host; return a copy of what came, and the sums."""
    result = communication.dispatch(
        tokens.hidden_states,
        tokens.topk_ids,
        tokens.topk_weights,
        runtime_max_tokens_per_rank=tokens_per_rank,
    )
    partial = partial_rows(
        communication.params, communication.ep_size, communication.ep_rank, result
    )
    if combine_input == "buffer":
        buffer = communication.get_combine_input_buffer()
        assert buffer is not None
        partial = buffer.copy_(partial)
    received = Received.copied(result)
    return received, communication.combine(partial)


class CapturedRound:
    """A round over inputs that stay where they are, captured after an eager one."""

    def __init__(
        self,
        communication: MoEEpCommunication,
        num_tokens: int,
        tokens_per_rank: int,
        combine_input: str = "tensor",
    ) -> None:
        rank, device = communication.ep_rank, communication.device
        self._communication = communication
        self._inputs = tokens_of(communication.params, 0, rank, num_tokens, device)
        run_round(communication, self._inputs, tokens_per_rank, combine_input)
        communication.check()
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph, device):
            self._received, self._combined = run_round(
                communication, self._inputs, tokens_per_rank, combine_input
            )

    def replay(self, verdict: Verdict, index: int, sent: list[Tokens]) -> None:
        """Replay with this rank's part of `sent` as round `index` of the verdict."""
        communication = self._communication
        mine = sent[communication.ep_rank]
        self._inputs.copy_(mine)
        self._graph.replay()
        verdict.judge_dispatch(index, self._received, sent)
        wanted = expected_sums(
            communication.params,
            communication.ep_size,
            mine,
            low_precision=getattr(communication.config, "use_low_precision_combine", False),
        )
        verdict.judge_sums(index, self._combined, wanted)


def sent_by_all(
    communication: MoEEpCommunication, stamp: int, counts: list[int], valid: list[int] | None = None
) -> list[Tokens]:
    return [
        tokens_of(
            communication.params,
            stamp,
            source,
            n,
            communication.device,
            valid=None if valid is None else valid[source],
        )
        for source, n in enumerate(counts)
    ]


def play_eagerly(
    communication: MoEEpCommunication, verdict: Verdict, index: int, counts: list[int], most: int
) -> None:
    sent = sent_by_all(communication, 1000 + index, counts)
    mine = sent[communication.ep_rank]
    received, combined = run_round(communication, mine, most, "tensor")
    verdict.judge_dispatch(index, received, sent)
    wanted = expected_sums(communication.params, communication.ep_size, mine)
    verdict.judge_sums(index, combined, wanted)
