"""Are the logits of all ranks those of the same model in one process?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

TOLERANCE = 1e-4
"""Largest difference of a logit; logits lie within about +-8.

Both models add the same float32 numbers in another order: one process adds a token's experts one
after the other; a rank adds those that it owns, and combine adds the ranks' sums. A product of
matrices, too, may add in another order when an expert gets other rows beside a token's. On the CPU
that moves a logit by about 1e-6 a layer, while a lost token or a wrong expert moves it by 0.01 or
more.
"""

ROUTER_TIE = 2e-5
"""Difference of two router logits below which that other order may swap their experts.

Router logits lie within about +-5. Such a token may differ, and rightly, and so may the tokens
behind it, which attend to it. The default run has none.
"""


@dataclass(frozen=True)
class Agreement:
    """How the logits of a number of tokens compare with those of one process."""

    tokens: int
    largest_difference: float
    same_next_token: int
    """Tokens with the same most likely next token."""
    wrong: int
    """Tokens beyond the tolerance, or with another most likely next token, that no tie explains."""

    def over_ranks(self) -> Agreement:
        """All ranks' tokens together. Collective."""
        sums = torch.tensor([self.tokens, self.same_next_token, self.wrong])
        largest = torch.tensor(self.largest_difference)
        dist.all_reduce(sums)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        tokens, same_next_token, wrong = (int(count) for count in sums)
        return Agreement(tokens, largest.item(), same_next_token, wrong)


def compare_logits(
    logits: Tensor, expected: Tensor, router_logits: tuple[Tensor, ...], top_k: int
) -> Agreement:
    """Compare one sequence.

    logits, expected: [1, tokens, vocabulary].
    router_logits: those behind `expected`, [tokens, experts] for each layer.
    """
    logits, expected = logits[0], expected[0]
    difference = (logits - expected).abs().amax(dim=-1)
    same_next_token = logits.argmax(dim=-1) == expected.argmax(dim=-1)
    best = expected.topk(2, dim=-1).values
    next_token_tie = best[:, 0] - best[:, 1] <= 2 * TOLERANCE

    router_tie = torch.zeros_like(same_next_token)
    for layer in router_logits:
        ranking = layer.float().topk(top_k + 1, dim=-1).values
        router_tie |= ranking[:, top_k - 1] - ranking[:, top_k] <= ROUTER_TIE
    behind_router_tie = router_tie.cumsum(dim=0) > 0

    # No comparison with a NaN holds, so a NaN is wrong.
    right = (difference <= TOLERANCE) & (same_next_token | next_token_tie)
    right |= behind_router_tie & (difference < torch.inf)
    return Agreement(
        tokens=logits.size(0),
        largest_difference=difference.max().item(),
        same_next_token=int(same_next_token.sum()),
        wrong=int((~right).sum()),
    )
