"""A small language model of bytes whose feed-forward layers are experts spread over ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

from moe_ep import (
    BootstrapConfig,
    GroupedGemmConfig,
    MoEEpCommParams,
    MoEEpLayer,
    SplitConfig,
)
from moe_lm.text import VOCABULARY

WIDTH, HEADS, BLOCKS, LENGTH = 64, 4, 2, 64
EXPERTS, TOP_K, EXPERT_WIDTH = 8, 2, 128


class Experts(nn.Module):
    """Router and experts."""

    def __init__(self, bootstrap: BootstrapConfig, backend: str, max_tokens: int) -> None:
        super().__init__()
        params = MoEEpCommParams(EXPERTS, TOP_K, max_tokens, WIDTH, dtype=torch.float32)
        kernel = GroupedGemmConfig(intermediate_size=EXPERT_WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.layer = MoEEpLayer(bootstrap, params, SplitConfig(comm=backend, kernel=kernel))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.router(tokens).softmax(dim=1).topk(TOP_K)
        return self.layer(tokens, ids, weights / weights.sum(dim=1, keepdim=True)).view_as(x)


class Block(nn.Module):
    """Attention, then experts, each on normalised input and added to it."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.experts(self.norms[1](x))


class ByteModel(nn.Module):
    """From bytes [b, length] to logits of the next ones, [b, length, 256]."""

    def __init__(self, bootstrap: BootstrapConfig, backend: str, max_tokens: int) -> None:
        """Collective. The same weights for every number of ranks."""
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            Block(Experts(bootstrap, backend, max_tokens)) for _ in range(BLOCKS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        # The draws so far depend on how many experts are here.
        random = torch.Generator().manual_seed(1)
        for value in self.replicated_parameters():
            if value.dim() == 2:
                nn.init.normal_(value, std=value.shape[1] ** -0.5, generator=random)
        for number, layer in enumerate(self.layers()):
            layer.load_full_state_dict(all_experts(number))

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        x = self.embedding(text) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def layers(self) -> list[MoEEpLayer]:
        """Return the layers whose experts are spread over the ranks."""
        return [module for module in self.modules() if isinstance(module, MoEEpLayer)]

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return those of this rank's experts."""
        return [value for layer in self.layers() for value in layer.parameters()]

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Return those that every rank has."""
        own = {id(value) for value in self.expert_parameters()}
        return [value for value in self.parameters() if id(value) not in own]


def all_experts(layer: int) -> dict[str, Tensor]:
    """Return the first weights of all experts of a layer."""
    random = torch.Generator().manual_seed(100 + layer)
    w13 = torch.randn(EXPERTS, 2 * EXPERT_WIDTH, WIDTH, generator=random) * WIDTH**-0.5
    w2 = torch.randn(EXPERTS, WIDTH, EXPERT_WIDTH, generator=random) * EXPERT_WIDTH**-0.5
    return {"w13": w13, "w2": w2}
