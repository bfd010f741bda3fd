"""Expert parallelism of Hugging Face transformers over moe_ep, for inference and training.

    from moe_ep.integrations.transformers import register

    experts = register("auto", max_tokens_per_rank=4096)
    model = AutoModelForCausalLM.from_pretrained(path, **experts.load_options(path))

Each rank then holds its own batch, 1 / ep_size of the experts of every layer, read alone from the
checkpoint, and one workspace that all layers use in turn. Needs transformers 5.17 or later.

* Where transformers has a registry of expert-parallel implementations (5.24), "moe_ep" is one of
  them: `DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="moe_ep")`, also with tp_size,
  where the ranks of a group share a batch.
* Before, "moe_ep" is an experts implementation (`experts_implementation="moe_ep"`), and the
  model's expert-parallel plan is used for the parameters of the experts alone. The rest of the
  model is replicated.

Forward and backward are collective: all ranks run the model, and as often. In `generate` a rank
whose text has ended must go on while another's has not: `synced_gpus=True` (in 5.24 the default
with fsdp_size > 1).
"""

from moe_ep.integrations.transformers.registration import ExpertParallelism, register

__all__ = ["ExpertParallelism", "register"]
