"""What each rank does: load the model, check its logits, time both exchanges, report."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm
from transformers import PreTrainedModel, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.utils import logging as transformers_logging

from hf_moe.check import compare_logits
from hf_moe.clock import ExchangeClock, PassTimes, best, timed
from hf_moe.model import input_ids, saved_model
from hf_moe.places import describe, enter, group_backends
from hf_moe.report import header, table, verdict
from moe_ep import MoEEpError
from moe_ep.integrations.transformers import register

OURS, THEIRS = "moe_ep", "all_to_all"  # names in transformers' registry


def run_rank(options: argparse.Namespace) -> int:
    """The whole job of this process. Returns its exit code."""
    device = enter(options.device)
    # No device_id: the group would be split over NCCL alone, and moe_ep agrees over Gloo.
    dist.init_process_group(group_backends(options.device))
    torch.set_float32_matmul_precision("highest")  # the check is about float32, not TF32
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        return check_and_time(options, device)
    except (MoEEpError, ValueError, OSError) as error:
        print(f"rank {dist.get_rank()}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process, but not through Python's own end.

    Caches of torch.distributed.tensor keep the models' meshes, and with them groups that
    `destroy_process_group` has destroyed. A thread of Gloo that lets go of its last tensor while
    Python ends would abort the process: "terminate called without an active exception".
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@torch.no_grad()
def check_and_time(options: argparse.Namespace, device: torch.device) -> int:
    """Returns 0 if all ranks' logits are those of one process, else 1. Rank 0 prints a report."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    clock = ExchangeClock(device)
    experts = register(options.backend, max_tokens_per_rank=options.tokens, name=OURS)
    implementations = EPImplementationInterface()
    for name in (OURS, THEIRS):
        implementations.register(name, timed(implementations[name], clock))
    if rank == 0:
        print(header(options, describe(device)), flush=True)

    with tqdm(total=6 + 2 * options.repeats, disable=rank != 0, leave=False) as progress:

        def run(model: PreTrainedModel, doing: str, **kwargs: Any) -> Any:
            progress.set_description(doing, refresh=False)
            output = model(ids, use_cache=False, **kwargs)
            progress.update()
            return output

        progress.set_description("loading")
        folder = saved_once(options)
        ids = input_ids(folder, options.tokens, rank, ranks).to(device)
        one_process = load(folder, device).to(device)
        progress.update()
        models = {}
        for name in (OURS, THEIRS):
            models[name] = load_expert_parallel(folder, device, name)
            progress.update()

        expected = run(one_process, "one process", output_router_logits=True)
        logits = run(models[OURS], "checking").logits
        top_k = one_process.config.num_experts_per_tok
        agreement = compare_logits(logits, expected.logits, expected.router_logits, top_k)
        agreement = agreement.over_ranks()

        run(models[THEIRS], "warming up")
        passes: dict[str, list[PassTimes]] = {name: [] for name in models}
        for _ in range(options.repeats):
            for name, model in models.items():  # by turns: other load on the machine meets both
                forward = partial(run, model, f"timing {name}")
                passes[name].append(clock.time_pass(forward))

    if rank == 0:
        ours = f"moe_ep ({experts.communications[0].backend_name})"
        times = {ours: best(passes[OURS]), f"transformers {THEIRS}": best(passes[THEIRS])}
        through_host = device.type == "cuda" and "nccl" not in group_backends(device.type)
        print(table(times, options, theirs_goes_through_host=through_host))
        print(verdict(agreement, f"{ranks} ranks over {ours}"), flush=True)
    experts.destroy()
    return 1 if agreement.wrong else 0


def saved_once(options: argparse.Namespace) -> Path:
    """The saved model's folder, made by rank 0 where it is missing."""
    if dist.get_rank() == 0:
        saved_model(options.layers, options.cache)
    dist.barrier()
    return saved_model(options.layers, options.cache)


def load(folder: Path, device: torch.device, **kwargs: Any) -> PreTrainedModel:
    # transformers' default, grouped_mm, is for GPUs: on a CPU it takes twice as long as a loop.
    experts = "eager" if device.type == "cpu" else "grouped_mm"
    return Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation=experts, **kwargs
    )


def load_expert_parallel(
    folder: Path, device: torch.device, implementation: str
) -> PreTrainedModel:
    """Load this rank's share of the experts, reached through `implementation`. Collective."""
    ranks = dist.get_world_size()
    # fsdp_size = ep_size: each rank has its own batch; with tp_size they would share one.
    layout = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation=implementation)
    model = load(folder, device, distributed_config=layout)
    # FSDP shards the rest of the model too and would gather it in each pass: gather it once.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(False)
    return model
