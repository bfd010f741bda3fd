"""How do partial rows get back to their tokens' ranks? Behind a word: that there are some."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ep import _native
from moe_ep.errors import MoEEpAbandonedError
from moe_ep.torch_dist.records import as_bytes
from moe_ep.torch_dist.transport import Transport


def exchange_partials(
    transport: Transport,
    rows: Tensor,
    recv_counts: list[int],
    send_counts: list[int],
    *,
    abandons: bool = False,
) -> list[Tensor]:
    """Return for each owner, in rank order, its rows for this rank's tokens. Collective.

    rows: [ep_size, tokens_per_rank, hidden_size]: for each source as many as came from it,
        `recv_counts`. send_counts: how many went to each owner.
    abandons: they mean nothing, and no rank gets a sum.

    Raises MoEEpAbandonedError on all ranks where that is true of any.
    """
    # One row in front of each rank's. Of its own, so that all learn it who get no other row, too.
    word = rows.new_full((1, rows.shape[2]), float(abandons))
    made = [block[:count] for block, count in zip(rows, recv_counts, strict=True)]
    blocks = [part for block in made for part in (word, block)]
    to_each, from_each = ([count + 1 for count in of] for of in (recv_counts, send_counts))
    received = transport.exchange_rows("combine", as_bytes(torch.cat(blocks)), to_each, from_each)
    blocks = list(torch.split(received.view(rows.dtype), from_each))
    words = torch.stack([block[0, 0] for block in blocks]).tolist()
    abandoners = [str(rank) for rank, word in enumerate(words) if word != 0]
    if abandoners:
        raise MoEEpAbandonedError(_native.abandoned_message(", ".join(abandoners)))
    return [block[1:] for block in blocks]
