"""How a transformers model reaches its experts through moe_ep.

transformers (5.24 and later) lets an expert-parallel model name how tokens get to their experts.
This module adds the name "moe_ep"; a script needs three lines:

    communications = register_moe_ep("cake", max_tokens_per_rank=256)
    layout = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="moe_ep")
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=layout)

It is for inference: each rank holds its own batch and 1 / ep_size of the experts of every layer.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from moe_ep import BootstrapConfig, MoEEpCommParams, MoEEpCommunication, create_communication


class SharedCommunications:
    """One communication for each EP group and token shape, used by every layer in turn.

    A round is dispatch, experts, combine, and layers run one after the other: one object, with one
    workspace, serves them all. It is made when a layer first runs, which all ranks of the group do.
    """

    def __init__(self, backend: str, max_tokens_per_rank: int) -> None:
        self.backend = backend
        self.max_tokens_per_rank = max_tokens_per_rank
        self._communications: dict[tuple[object, MoEEpCommParams], MoEEpCommunication] = {}

    def get(
        self, ep_mesh: DeviceMesh, num_experts: int, top_k: int, hidden_states: Tensor
    ) -> MoEEpCommunication:
        """The communication for tokens like `hidden_states`. Collective on first use."""
        group = ep_mesh.get_group()
        params = MoEEpCommParams(
            num_experts=num_experts,
            top_k=top_k,
            max_tokens_per_rank=self.max_tokens_per_rank,
            hidden_size=hidden_states.size(-1),
            dtype=hidden_states.dtype,
        )
        if (group, params) not in self._communications:
            bootstrap = BootstrapConfig.from_process_group(group, device=hidden_states.device)
            communication = create_communication(bootstrap, params, self.backend)
            self._communications[group, params] = communication
        return self._communications[group, params]

    @property
    def backend_name(self) -> str:
        """What moves the tokens; known once a layer has run, if "auto" was asked for."""
        names = {communication.backend_name for communication in self._communications.values()}
        return ", ".join(sorted(names)) or self.backend

    def destroy(self) -> None:
        """Give all workspaces back. Collective."""
        for communication in self._communications.values():
            communication.destroy()
        self._communications.clear()


class MoEEpImplementation(EPImplementation):
    """The experts of one layer: dispatch, this rank's experts on what arrived, combine."""

    def __init__(
        self,
        experts: nn.Module,
        ep_mesh: DeviceMesh,
        tp_mesh: DeviceMesh,
        *,
        communications: SharedCommunications,
    ) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise ValueError(
                "moe_ep wants each rank to hold its own batch (tp_size=1), got "
                f"tp_size={tp_mesh.size()}. Use DistributedConfig(fsdp_size=N, ep_size=N)."
            )
        self.communications = communications

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, [n, hidden_size].

        hidden_states: [n, hidden_size]; top_k_index: [n, top_k] global expert ids;
        top_k_weights: [n, top_k].
        """
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise RuntimeError("this moe_ep example is for inference: call the model under no_grad")
        rows, local_ids, weights, communication = self._dispatch_tokens(
            hidden_states, top_k_index, top_k_weights
        )
        return self._combine_tokens(self.experts_forward(rows, local_ids, weights), communication)

    def _dispatch_tokens(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, MoEEpCommunication]:
        """Each token to every rank that owns one of its experts: rows, local expert ids, weights.

        transformers' experts skip a slot whose id is `num_local_experts`. Picks that another rank
        owns get this id, and so do rows without a token, whose contents are unspecified.
        """
        communication = self.communications.get(
            self.ep_mesh,
            num_experts=self.num_local_experts * self.ep_mesh.size(),
            top_k=top_k_index.size(-1),
            hidden_states=hidden_states,
        )
        received = communication.dispatch(hidden_states, top_k_index, top_k_weights.float())
        assert received.topk_weights is not None  # weights were sent
        local_ids = received.topk_ids.long() - communication.first_local_expert
        elsewhere = (local_ids < 0) | (local_ids >= self.num_local_experts)
        local_ids.masked_fill_(elsewhere, self.num_local_experts)
        weights = received.topk_weights.masked_fill(elsewhere, 0.0)
        return received.hidden_states, local_ids, weights, communication

    def _combine_tokens(self, expert_output: Tensor, communication: MoEEpCommunication) -> Tensor:
        """This rank's partial results back to the ranks that hold the tokens, summed per token."""
        return communication.combine(expert_output)


def register_moe_ep(
    backend: str,
    max_tokens_per_rank: int,
    *,
    name: str = "moe_ep",
    implementation: type[MoEEpImplementation] = MoEEpImplementation,
) -> SharedCommunications:
    """Let `DistributedConfig(ep_implementation=name)` mean moe_ep over `backend`.

    max_tokens_per_rank: the most tokens that a rank passes in one forward.
    Returns the communications, for `destroy()` when the models are done.
    """
    communications = SharedCommunications(backend, max_tokens_per_rank)
    EPImplementationInterface.register(name, partial(implementation, communications=communications))
    return communications
