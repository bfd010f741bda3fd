"""How do a round's bytes get to the peers? Gloo point to point for CPU tensors, NCCL for CUDA ones.

Every wait ends: after `timeout_sec` of wall clock a call raises MoEEpTimeoutError.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep.errors import MoEEpTimeoutError
from moe_ep.peer_exchange import Deadline, PeerSilentError, exchange, has_gloo

# Added to the object's tag, so that a message of one phase is never taken for another's.
_HEADER, _DISPATCH_ROWS, _COMBINE_ROWS = range(3)
NUM_TAGS = 3


class Transport:
    """The exchange between the ranks of one group for one communication."""

    def __init__(
        self, group: dist.ProcessGroup | None, ep_rank: int, ep_size: int, tag: int, seconds: int
    ) -> None:
        """group: None for ep_size 1. tag: the object's own, with `NUM_TAGS` values free from it on.

        seconds: how long one call waits.
        """
        self._group = group
        self._ep_rank = ep_rank
        self._ep_size = ep_size
        self._tag = tag
        self._seconds = seconds
        self._deadline = Deadline(seconds)
        self._epoch = 0
        self._epochs_seen = [0] * ep_size
        self._headers_over_gloo = group is not None and has_gloo(group)

    def close(self) -> None:
        """Let go of the group. No call follows."""
        self._group = None

    def start_call(self, epoch: int) -> None:
        """Start the clock of a call of dispatch or combine in round `epoch`."""
        self._deadline = Deadline(self._seconds)
        self._epoch = epoch

    def exchange_headers(self, headers: Tensor, device: torch.device) -> Tensor:
        """Send row p of `headers` to rank p; return what each rank sent to this one. Collective.

        headers: [ep_size, words] int64 on the CPU, as the result. The first two words are the
        number of rows and the epoch. device: where the group's tensors are if it has no Gloo.
        """
        if self._group is None:
            return headers
        if self._headers_over_gloo:
            received = torch.empty_like(headers)
            self._over_gloo("dispatch", list(headers), list(received), _HEADER)
        else:
            on_device = headers.to(device)
            received = torch.empty_like(on_device)
            self._over_nccl("dispatch", received, on_device, None, None)
            received = received.cpu()
        self._note_epochs(received[:, 1].tolist())
        return received

    def exchange_rows(
        self, phase: str, rows: Tensor, send_counts: list[int], recv_counts: list[int]
    ) -> Tensor:
        """Send the next `send_counts[p]` rows to each rank p; return what came. Collective.

        phase: "dispatch" or "combine". rows: [sum(send_counts), bytes] uint8, contiguous; the
        result is [sum(recv_counts), bytes], by rank.
        """
        if self._group is None:
            return rows
        received = rows.new_empty(sum(recv_counts), rows.shape[1])
        if rows.is_cuda:
            self._over_nccl(phase, received, rows, recv_counts, send_counts)
        else:
            tag = _DISPATCH_ROWS if phase == "dispatch" else _COMBINE_ROWS
            outgoing = torch.split(rows, send_counts)
            incoming = torch.split(received, recv_counts)
            self._over_gloo(phase, list(outgoing), list(incoming), tag)
        return received

    def exchange_blocks(self, blocks: Tensor) -> Tensor:
        """Send row p of `blocks` to rank p; return what each rank sent to this one. Collective.

        blocks: [ep_size, bytes] uint8, contiguous, of the same size on all ranks; so is the result.
        Only issued: the host does not wait, so that it can be captured in a CUDA graph.
        """
        if self._group is None:
            return blocks
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=self._group)
        return received

    def _over_gloo(
        self, phase: str, outgoing: list[Tensor], incoming: list[Tensor], tag: int
    ) -> None:
        assert self._group is not None
        try:
            exchange(self._group, outgoing, incoming, self._tag + tag, self._deadline)
        except PeerSilentError as silent:
            peer = silent.peer
            raise MoEEpTimeoutError(
                f"rank {self._ep_rank} waited {silent.seconds:.1f} s in {phase} for rank {peer} "
                f"(epoch {self._epoch} expected, {self._epochs_seen[peer]} seen; {silent.reason}). "
                f"Rank {peer} may be dead, slow, or on another number of rounds; re-create the "
                "group, without it if it is dead."
            ) from None

    def _over_nccl(
        self,
        phase: str,
        received: Tensor,
        rows: Tensor,
        recv_counts: list[int] | None,
        send_counts: list[int] | None,
    ) -> None:
        try:
            work = dist.all_to_all_single(
                received, rows, recv_counts, send_counts, group=self._group, async_op=True
            )
            assert work is not None
            # Waiting with a timeout blocks the host, which is what makes it end; but then it looks
            # once a millisecond. So that is left for the end of the budget.
            while not work.is_completed() and not self._deadline.expired():
                time.sleep(0)
            work.wait(timedelta(seconds=self._deadline.remaining()))
        except RuntimeError as exc:
            raise MoEEpTimeoutError(
                f"rank {self._ep_rank} waited {self._deadline.elapsed():.1f} s in {phase} for the "
                f"group (epoch {self._epoch}; NCCL does not say for which rank: {exc}). A rank may "
                "be dead, slow, or on another number of rounds; re-create the group."
            ) from None

    def _note_epochs(self, epochs: list[int]) -> None:
        self._epochs_seen = epochs
        for peer, epoch in enumerate(epochs):
            if epoch != self._epoch:
                raise MoEEpTimeoutError(
                    f"rank {self._ep_rank} met rank {peer} in another round of dispatch (epoch "
                    f"{self._epoch} expected, {epoch} seen): a call failed on one of them only. "
                    "Re-create the communication on all ranks."
                )
