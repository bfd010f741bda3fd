"""moe_ep in transformers' registry of expert-parallel implementations (5.24 and later)."""

from __future__ import annotations

import functools

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from moe_ep.communication import MoEEpCommunication
from moe_ep.integrations.transformers import exchange, shared_batch
from moe_ep.integrations.transformers.communications import SharedCommunications
from moe_ep.integrations.transformers.exchange import OpenRound
from moe_ep.integrations.transformers.shared_batch import Slices
from moe_ep.integrations.transformers.support import (
    experts_implementation_of,
    require_dispatchable,
)


class MoEEpImplementation(EPImplementation):  # type: ignore[misc]
    """The experts of one layer: dispatch, this rank's experts on what arrived, combine.

    Ranks that hold the same batch send it nowhere where they can read each other's memory; else
    each sends its slice of it.
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
        communication = self._communications.get(
            self.ep_mesh.get_group(),
            num_experts=self.num_local_experts * self.ep_mesh.size(),
            top_k=top_k_index.shape[-1],
            hidden_states=hidden_states,
        )
        given = (hidden_states, top_k_index, top_k_weights)
        experts, asks_host = self.experts_forward, self._asks_host
        if self.shares_batch:
            sums = shared_batch.run_in_place(communication, *given, experts)
            if sums is not None:
                return sums
        slices, largest = None, hidden_states.shape[0]
        if self.tp_mesh.size() > 1:
            slices = Slices(self.tp_mesh.get_group(), hidden_states.shape[0])
            given = (slices.own(given[0]), slices.own(given[1]), slices.own(given[2]))
            largest = slices.rows_per_rank
        one = self._dispatch_tokens(communication, *given, largest if self._equal_rounds else None)
        made = exchange.run_experts(one, experts, asks_host=asks_host)
        output = self._combine_tokens(made, one)
        return output if slices is None else slices.all(output)

    # Methods of these names has transformers' AllToAllEP, too: who times one can time the other.

    def _dispatch_tokens(
        self,
        communication: MoEEpCommunication,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        largest: int | None,
    ) -> OpenRound:
        return exchange.dispatch(communication, hidden_states, top_k_index, top_k_weights, largest)

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
