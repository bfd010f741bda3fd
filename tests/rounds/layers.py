"""What are the experts of a MoEEpLayer in plain torch, all in one place? And inputs for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's own name for it)

from moe_ep import GroupedGemmConfig, MoEEpCommParams

State = Mapping[str, Tensor]
Values = Callable[[Sequence[int], int], Tensor]

_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "swiglu": lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    "geglu": lambda h: F.gelu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
}


def small_integers(shape: Sequence[int], seed: int) -> Tensor:
    """Return -2 to 2."""
    return torch.randint(-2, 3, tuple(shape), generator=torch.Generator().manual_seed(seed)).float()


def random_state(params: MoEEpCommParams, kernel: GroupedGemmConfig, values: Values) -> State:
    """Return the weights of all experts."""
    experts, hidden, inner = params.num_experts, params.hidden_size, kernel.intermediate_size
    outer = inner * (2 if kernel.activation in ("swiglu", "geglu") else 1)
    shapes = {"w13": (experts, outer, hidden), "w2": (experts, hidden, inner)}
    if kernel.bias:
        shapes |= {"w13_bias": (experts, outer), "w2_bias": (experts, hidden)}
    return {
        name: values(shape, seed).to(params.token_dtype)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def random_inputs(
    params: MoEEpCommParams, num_tokens: int, values: Values, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, ids of which some are padding, and weights that are powers of two."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, params.num_experts, (num_tokens, params.top_k), generator=g)
    weights = torch.randint(-2, 2, ids.shape, generator=g).float().exp2()
    return values((num_tokens, params.hidden_size), seed).to(params.token_dtype), ids, weights


def plain_experts(
    kernel: GroupedGemmConfig, state: State, x: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """Return [n, hidden_size]: for each token the sum over its picks of weight * expert."""
    total = torch.zeros_like(x)
    for expert in range(len(state["w2"])):
        h = x @ state["w13"][expert].T
        if kernel.bias:
            h = h + state["w13_bias"][expert]
        y = _PLAIN[kernel.activation](h) @ state["w2"][expert].T
        if kernel.bias:
            y = y + state["w2_bias"][expert]
        total = total + torch.where(ids == expert, weights, 0).sum(1, keepdim=True).to(y) * y
    return total
