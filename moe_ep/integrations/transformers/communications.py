"""Which communication serves a layer? One for each group and shape of tokens, for all in turn."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_ep.bootstrap import BootstrapConfig
from moe_ep.communication import MoEEpCommunication
from moe_ep.config import CommunicationConfig
from moe_ep.params import MoEEpCommParams
from moe_ep.registry import create_communication


class SharedCommunications:
    """Communications, made when a layer first runs, which all ranks of its group do.

    Layers run one after the other, a round each: one object with one workspace serves them all.
    """

    def __init__(
        self,
        backend: str | CommunicationConfig,
        max_tokens_per_rank: int,
        options: dict[str, Any],
    ) -> None:
        """The arguments are those of `create_communication` and of its params."""
        self.backend = backend
        self.max_tokens_per_rank = max_tokens_per_rank
        self._options = options
        self._made: dict[tuple[Hashable, ...], MoEEpCommunication] = {}

    def get(
        self, group: dist.ProcessGroup, num_experts: int, top_k: int, hidden_states: Tensor
    ) -> MoEEpCommunication:
        """Return the communication for tokens like `hidden_states`. Collective when it is new."""
        # A communication holds its group.
        key = (id(group), num_experts, top_k, hidden_states.shape[-1], hidden_states.dtype)
        if key not in self._made:
            params = MoEEpCommParams(
                num_experts=num_experts,
                top_k=top_k,
                max_tokens_per_rank=self.max_tokens_per_rank,
                hidden_size=hidden_states.shape[-1],
                dtype=hidden_states.dtype,
            )
            bootstrap = BootstrapConfig.from_process_group(group, device=hidden_states.device)
            self._made[key] = create_communication(bootstrap, params, self.backend, **self._options)
        return self._made[key]

    @property
    def made(self) -> tuple[MoEEpCommunication, ...]:
        """Those that there are by now."""
        return tuple(self._made.values())

    def destroy(self) -> None:
        """Destroy them. Layers that run later make new ones."""
        for communication in self._made.values():
            communication.destroy()
        self._made.clear()
