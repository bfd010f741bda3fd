"""moe_ep in transformers' registry of expert-parallel implementations (5.24 and later)."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from moe_ep.integrations.transformers import exchange
from moe_ep.integrations.transformers.communications import SharedCommunications
from moe_ep.integrations.transformers.exchange import OpenRound
from moe_ep.integrations.transformers.shared_batch import Slices
from moe_ep.integrations.transformers.support import (
    experts_implementation_of,
    require_dispatchable,
)


class MoEEpImplementation(EPImplementation):  # type: ignore[misc]
    """The experts of one layer: dispatch, this rank's experts on what arrived, combine.

    Where the ranks of a tensor-parallel group hold the same batch, each sends its slice of it.
    """

    def __init__(
        self,
        experts: nn.Module,
        ep_mesh: DeviceMesh,
        tp_mesh: DeviceMesh,
        *,
        communications: SharedCommunications,
        same_tokens_on_all_ranks: bool,
    ) -> None:
        """As transformers calls it, once for each experts module.

        Raises MoEEpConfigError naming a module that moe_ep cannot run.
        """
        require_dispatchable(experts)
        super().__init__(experts, ep_mesh, tp_mesh)
        self._communications = communications
        self._asks_host = experts_implementation_of(experts) in (None, "eager")
        self._equal_rounds = same_tokens_on_all_ranks or self.shares_batch

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [n, hidden_size]. Collective.

        hidden_states: [n, hidden_size]; top_k_index: [n, top_k] global expert ids; top_k_weights:
        [n, top_k].
        """
        slices = None
        if self.tp_mesh.size() > 1:
            slices = Slices(self.tp_mesh.get_group(), hidden_states.shape[0])
            hidden_states, top_k_weights = slices.own(hidden_states), slices.own(top_k_weights)
            top_k_index = slices.own(top_k_index)
        one = self._dispatch_tokens(hidden_states, top_k_index, top_k_weights, slices)
        partial = exchange.run_experts(one, self.experts_forward, asks_host=self._asks_host)
        output = self._combine_tokens(partial, one)
        return output if slices is None else slices.all(output)

    def _dispatch_tokens(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, slices: Any
    ) -> OpenRound:
        communication = self._communications.get(
            self.ep_mesh.get_group(),
            num_experts=self.num_local_experts * self.ep_mesh.size(),
            top_k=top_k_index.shape[-1],
            hidden_states=hidden_states,
        )
        largest = hidden_states.shape[0] if slices is None else slices.rows_per_rank
        return exchange.dispatch(
            communication,
            hidden_states,
            top_k_index,
            top_k_weights,
            largest if self._equal_rounds else None,
        )

    def _combine_tokens(self, expert_output: Tensor, one: OpenRound) -> Tensor:
        return exchange.combine(one, expert_output)


def add_implementation(
    name: str, communications: SharedCommunications, *, same_tokens_on_all_ranks: bool
) -> None:
    """Let `DistributedConfig(ep_implementation=name)` mean moe_ep."""
    made = functools.partial(
        MoEEpImplementation,
        communications=communications,
        same_tokens_on_all_ranks=same_tokens_on_all_ranks,
    )
    EPImplementationInterface.register(name, made)
