"""How does transformers come to know moe_ep, and a model to be loaded with it?"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

from moe_ep.communication import MoEEpCommunication
from moe_ep.config import CommunicationConfig, require_int_in_range
from moe_ep.errors import MoEEpConfigError
from moe_ep.integrations.transformers.communications import SharedCommunications
from moe_ep.integrations.transformers.experts_function import (
    add_experts_function,
    of_experts_alone,
)
from moe_ep.integrations.transformers.support import require_expert_parallel_plan
from moe_ep.limits import INT32_MAX

_OLDEST = (5, 17)


@dataclass(frozen=True)
class ExpertParallelism:
    """moe_ep as transformers knows it.

    name: `ep_implementation` and `experts_implementation` of the models that use it.
    has_registry: whether transformers has expert-parallel implementations; else moe_ep is one of
        its experts implementations.
    """

    name: str
    has_registry: bool
    _communications: SharedCommunications

    def load_options(
        self,
        model: Any,
        *,
        ep_size: int | None = None,
        tp_size: int = 1,
        **more: Any,
    ) -> dict[str, Any]:
        """Return the keywords for `from_pretrained` with which a model loads expert-parallel, all
        its other weights whole on each rank or, with the registry, sharded by FSDP. Not collective.

        model: the path or name of the model, or its config.
        ep_size: ranks that share the experts; None: all processes.
        tp_size: ranks that hold the same batch, and with the model's tensor-parallel plan share the
            rest of it; other than 1 only with the registry.
        more: other fields of transformers' DistributedConfig.

        Raises MoEEpConfigError naming a model that has no expert-parallel plan.
        """
        given = isinstance(model, transformers.PretrainedConfig)
        config = model if given else transformers.AutoConfig.from_pretrained(model)
        plan = require_expert_parallel_plan(config)
        size = dist.get_world_size() if ep_size is None else ep_size
        if self.has_registry:
            fsdp_size = dist.get_world_size() // tp_size
            layout = {"fsdp_size": fsdp_size, "tp_size": tp_size, "ep_size": size, **more}
            return {"distributed_config": DistributedConfig(ep_implementation=self.name, **layout)}
        if tp_size != 1:
            raise MoEEpConfigError(
                f"tp_size must be 1 where moe_ep is an experts implementation, got {tp_size}."
            )
        return {
            "config": config,
            "distributed_config": _layout_of_experts_alone(config, plan, size, more),
            "experts_implementation": self.name,
        }

    @property
    def communications(self) -> tuple[MoEEpCommunication, ...]:
        """What moves the tokens; made when layers first run."""
        return self._communications.made

    def destroy(self) -> None:
        """Give all workspaces back. Idempotent; layers that run later make new ones."""
        self._communications.destroy()


def register(
    backend: str | CommunicationConfig = "auto",
    *,
    max_tokens_per_rank: int,
    name: str = "moe_ep",
    same_tokens_on_all_ranks: bool = False,
    **options: Any,
) -> ExpertParallelism:
    """Make moe_ep known to transformers. Not collective; equal on all ranks.

    backend, options: as of `create_communication`.
    max_tokens_per_rank: the most tokens that a rank passes in one forward: batch times length.
    name: what models ask for it by.
    same_tokens_on_all_ranks: every rank passes as many tokens as the others in each forward. Rounds
        then are no larger than these; otherwise each has room for max_tokens_per_rank.

    Raises MoEEpConfigError for a transformers that is too old, TypeError and MoEEpConfigError for a
    wrong max_tokens_per_rank. What else is wrong is raised when a layer first runs.
    """
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < _OLDEST:
        raise MoEEpConfigError(
            f"transformers must be {'.'.join(map(str, _OLDEST))} or later, got "
            f"{transformers.__version__}."
        )
    require_int_in_range("max_tokens_per_rank", max_tokens_per_rank, 1, INT32_MAX)
    communications = SharedCommunications(backend, max_tokens_per_rank, options)
    how = {"same_tokens_on_all_ranks": same_tokens_on_all_ranks}
    registry = has_registry()
    if registry:
        from moe_ep.integrations.transformers.ep_implementation import add_implementation

        add_implementation(name, communications, **how)
    else:
        add_experts_function(name, communications, **how)
    return ExpertParallelism(name, registry, communications)


def has_registry() -> bool:
    """Whether the installed transformers has a registry of expert-parallel implementations."""
    return importlib.util.find_spec("transformers.distributed.expert_parallel") is not None


def _layout_of_experts_alone(
    config: Any, plan: dict[str, str], size: int, more: dict[str, Any]
) -> DistributedConfig:
    """Return the layout in which nothing but the experts' parameters is spread over the ranks."""
    own = of_experts_alone(plan)
    if not own:
        raise MoEEpConfigError(
            f"the expert-parallel plan of {type(config).__name__} names no parameters of experts: "
            f"{plan}."
        )
    # Of the plan's other rules transformers would mask what other ranks own, and sum over all.
    config.get_text_config().base_model_ep_plan = own
    return DistributedConfig(tp_size=size, enable_expert_parallel=True, **more)
