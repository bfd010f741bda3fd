"""Which models and modules of transformers can moe_ep run?"""

from __future__ import annotations

from typing import Any

from torch import nn

from moe_ep.errors import MoEEpConfigError


def experts_implementation_of(experts: nn.Module) -> str | None:
    """Return the name of what computes the experts, None where the model does not say."""
    return getattr(getattr(experts, "config", None), "_experts_implementation", None)


def require_dispatchable(experts: nn.Module) -> None:
    """Raise MoEEpConfigError unless the module is experts that tokens can be brought to."""
    name = type(experts).__name__
    if not isinstance(getattr(experts, "num_experts", None), int):
        raise MoEEpConfigError(
            f"{name} has no num_experts, so that moe_ep cannot tell which rank owns which expert. "
            "Leave this module out of the expert-parallel plan."
        )
    implementation = experts_implementation_of(experts)
    if implementation == "deepgemm_megamoe":
        raise MoEEpConfigError(
            f"{name} runs with experts_implementation={implementation!r}, whose kernel moves the "
            "tokens itself: load the model with another experts_implementation."
        )


def require_expert_parallel_plan(config: Any) -> dict[str, str]:
    """Return the expert-parallel plan of a model's config. Raises MoEEpConfigError without one."""
    text_config = config.get_text_config()
    plan = getattr(text_config, "base_model_ep_plan", None)
    if not plan:
        raise MoEEpConfigError(
            f"{type(text_config).__name__} (model type {text_config.model_type!r}) has no "
            "expert-parallel plan: it is not a Mixture-of-Experts model, or transformers does not "
            "know how to spread its experts. Set base_model_ep_plan in its config."
        )
    return dict(plan)
