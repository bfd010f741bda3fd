"""moe_ep as an experts implementation, where transformers has no registry for expert parallelism
(5.17)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_ep.abandoned_round import abandoning
from moe_ep.errors import MoEEpConfigError
from moe_ep.experts.grouped_products import GroupedLinear, require_aligned, run_two_layers
from moe_ep.integrations.transformers import exchange
from moe_ep.integrations.transformers.communications import SharedCommunications
from moe_ep.integrations.transformers.exchange import OpenRound
from moe_ep.integrations.transformers.support import require_dispatchable
from moe_ep.tensors import host_may_read

EXPERTS_STYLE = "grouped_gemm"
"""transformers' name of the style that gives each rank its own experts' parameters."""


def add_experts_function(
    name: str, communications: SharedCommunications, *, same_tokens_on_all_ranks: bool
) -> None:
    """Let `experts_implementation=name` mean moe_ep."""
    run = partial(
        run_layer, communications=communications, same_tokens_on_all_ranks=same_tokens_on_all_ranks
    )
    ALL_EXPERTS_FUNCTIONS.register(name, run)


def of_experts_alone(plan: dict[str, str]) -> dict[str, str]:
    """Return what a plan says of the parameters of the experts, without what routes tokens."""
    return {name: style for name, style in plan.items() if style == EXPERTS_STYLE}


def run_layer(
    experts: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    communications: SharedCommunications,
    same_tokens_on_all_ranks: bool,
) -> Tensor:
    """Return the weighted sum of each token's experts, as transformers calls it. Collective.

    Raises MoEEpConfigError naming a module whose experts are not spread over the ranks.
    """
    require_dispatchable(experts)
    group, num_local_experts = _placement(experts)
    communication = communications.get(
        group,
        num_experts=num_local_experts * dist.get_world_size(group),
        top_k=top_k_index.shape[-1],
        hidden_states=hidden_states,
    )
    tokens_per_rank = hidden_states.shape[0] if same_tokens_on_all_ranks else None
    one = exchange.dispatch(
        communication, hidden_states, top_k_index, top_k_weights, tokens_per_rank
    )
    made = abandoning(communication, partial(_grouped_experts, experts, one))
    return exchange.combine(one, made)


def _placement(experts: nn.Module) -> tuple[dist.ProcessGroup, int]:
    """Return the group that the experts are spread over, and how many this rank owns."""
    down: Any = experts.down_proj
    if not isinstance(down, DTensor):
        raise MoEEpConfigError(
            f"the experts of {type(experts).__name__} are not spread over ranks: load the model "
            "with the options that load_options returns."
        )
    return down.device_mesh.get_group(), down.to_local().shape[0]


def _grouped_experts(experts: Any, one: OpenRound) -> Tensor:
    """Return what this rank's experts make of the received rows."""
    permuted = exchange.permute(one, is_counted=host_may_read(one.received.topk_ids))
    up = _layer(experts, "gate_up_proj" if experts.has_gate else "up_proj")
    activation = experts._apply_gate if experts.has_gate else experts.act_fn
    made = run_two_layers(permuted, up, activation, _layer(experts, "down_proj"))
    return exchange.unpermute(one, made, permuted)


def _layer(experts: Any, name: str) -> GroupedLinear:
    weight = _local(getattr(experts, name))
    weight = weight if experts.is_transposed else weight.transpose(1, 2)
    widths = {f"{name} in": weight.shape[1], f"{name} out": weight.shape[2]}
    require_aligned(weight.dtype, **widths)
    return GroupedLinear(
        weight, _local(getattr(experts, f"{name}_bias")) if experts.has_bias else None
    )


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
