"""How is the model trained on a mesh of data-parallel and expert-parallel ranks?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

from moe_lm.model import LENGTH, ByteModel
from moe_lm.text import VOCABULARY, Batches

LEARNING_RATE = 3e-3


class Trainer:
    """Trains a model, each rank on its share of every batch."""

    def __init__(
        self,
        model: ByteModel,
        batches: Batches,
        rank: int,
        ranks: int,
        replicas: dist.ProcessGroup | None,
    ) -> None:
        """replicas: the ranks that own the same experts; None: no others do."""
        self._model, self._batches = model, batches
        self._rank, self._ranks, self._replicas = rank, ranks, replicas
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def losses(self, steps: int) -> Iterator[float]:
        """Train; yield each step's loss, the mean over the whole batch. Collective."""
        for step in range(steps):
            text, following = self._batches(step, self._rank, self._ranks)
            self._optimizer.zero_grad()
            logits = self._model(text)
            # A part of the mean over all ranks' bytes: so every gradient is of that mean.
            total = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
            loss = total / self._bytes_of_batch(following)
            loss.backward()
            self._add_up_gradients()
            self._optimizer.step()
            if self._ranks > 1:
                loss = loss.detach().clone()
                dist.all_reduce(loss)
            yield loss.item()

    def _bytes_of_batch(self, mine: Tensor) -> Tensor:
        count = torch.tensor(float(mine.numel()))
        if self._ranks > 1:
            dist.all_reduce(count)
        return count

    def _add_up_gradients(self) -> None:
        """Experts have the gradients of their group's tokens, the rest those of its own."""
        if self._ranks > 1:
            all_reduce(self._model.replicated_parameters(), None)
        if self._replicas is not None:
            all_reduce(self._model.expert_parameters(), self._replicas)


def all_reduce(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Sum gradients over a group, None for all ranks, in one message."""
    grads = [value.grad for value in parameters if value.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


@torch.no_grad()
def sample(model: ByteModel, prompt: str, length: int) -> str:
    """Return the prompt continued by `length` bytes, the same on all ranks. Collective."""
    random = torch.Generator().manual_seed(0)
    text = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        logits = model(text[:, -LENGTH:])[0, -1]
        chances = (logits / 0.7).softmax(dim=0)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=random).view(1, 1)], 1)
    assert text.max() < VOCABULARY
    return bytes(text[0].tolist()).decode(errors="replace")
