"""How long does a layer of transformers take to bring tokens to their experts and back? moe_ep
against transformers' own ways, by turns in one run.

    torchrun --nproc-per-node=4 benchmarks/bench_transformers_exchange.py [--device cuda]

Ranks have batches of their own (all_to_all), or share one (all_to_all and all_reduce). A layer's
whole call is timed: with bringing each expert its rows, with weights and sums, but its experts
return what they are given. all_reduce leaves rows, weights and sums to them: there they do the
least that is to be done, for picks of the rank's own experts alone (`--whole-tokens`: not even
that, but weigh tokens as they are). Times are medians, of the slowest rank. Outputs are checked
first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from moe_ep.integrations.transformers import register

OURS = "moe_ep"
RIVALS = {"own": ("all_to_all",), "shared": ("all_to_all", "all_reduce")}
TOLERANCE = 0.02  # bfloat16, sums in other orders


class FreeExperts(nn.Module):
    """They return what they are given: rows of one pick each. Of whole tokens they make such rows,
    weigh and add them up; or, with whole_tokens, weigh the tokens."""

    def __init__(self, num_experts: int, whole_tokens: bool) -> None:
        super().__init__()
        self.num_experts = num_experts  # this rank's
        self.whole_tokens = whole_tokens

    def forward(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if ids.shape[1] == 1:
            return rows
        is_local = ids < self.num_experts
        if self.whole_tokens:
            return rows * (weights * is_local).sum(1, keepdim=True)
        token, slot = is_local.nonzero(as_tuple=True)
        made = rows[token]
        return torch.zeros_like(rows).index_add_(0, token, made * weights[token, slot].unsqueeze(1))


def main() -> None:
    options = parse()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    everyone = DeviceMesh(device.type, list(range(ranks)))
    alone = DeviceMesh(device.type, torch.arange(ranks).view(ranks, 1), mesh_dim_names=("a", "b"))
    known = register(options.backend, max_tokens_per_rank=max(options.tokens), name=OURS)
    if rank == 0:
        print(
            "| batch | tokens | moe_ep | "
            + " | ".join(RIVALS["shared"])
            + " | better one / moe_ep |"
        )
        print("|---|---:|---:|---:|---:|---:|")
    for batch, rivals in RIVALS.items():
        tp_mesh = everyone if batch == "shared" else alone["b"]
        for tokens in options.tokens:
            generator = torch.Generator().manual_seed(0 if batch == "shared" else rank)
            given = inputs(options, tokens, generator, device)
            experts = FreeExperts(options.num_experts // ranks, options.whole_tokens)
            layers = {
                name: EPImplementationInterface()[name](experts, everyone, tp_mesh)
                for name in (OURS, *rivals)
            }
            seconds = measure(layers, given, options.rounds, device)
            if rank == 0:
                print(line(batch, tokens, seconds), flush=True)
    known.destroy()
    dist.destroy_process_group()
    # Caches of torch.distributed.tensor still keep the meshes' groups, whose threads of Gloo can
    # abort Python's own end.
    sys.stdout.flush()
    os._exit(0)


def inputs(
    options: argparse.Namespace, tokens: int, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, options.hidden_size, generator=generator).bfloat16()
    scores = torch.rand(tokens, options.num_experts, generator=generator)
    weights, ids = scores.softmax(1).topk(options.top_k)
    weights = weights / weights.sum(1, keepdim=True)
    return x.to(device), ids.to(device), weights.to(device, torch.bfloat16)


@torch.no_grad()
def measure(
    layers: dict[str, EPImplementation],
    given: tuple[Tensor, Tensor, Tensor],
    rounds: int,
    device: torch.device,
) -> dict[str, float]:
    """Return the median seconds of each. Collective."""
    x, _, weights = given
    wanted = x * weights.sum(1, keepdim=True)
    for name, layer in layers.items():
        error = (layer(*given) - wanted).abs().max().item() if len(wanted) else 0.0
        if error > TOLERANCE * wanted.abs().max().item():
            raise AssertionError(f"{name} is wrong by {error}")
    samples: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(rounds):
        for name, layer in layers.items():  # by turns: other load on the machine meets all
            samples[name].append(once(lambda layer=layer: layer(*given), device))
    medians = torch.tensor([statistics.median(of) for of in samples.values()], dtype=torch.float64)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(samples, medians.tolist(), strict=True))


def once(call: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def line(batch: str, tokens: int, seconds: dict[str, float]) -> str:
    cells = [
        f"{1e3 * seconds[name]:.2f} ms" if name in seconds else ""
        for name in (OURS, *RIVALS["shared"])
    ]
    best = min(value for name, value in seconds.items() if name != OURS)
    return f"| {batch} | {tokens} | {' | '.join(cells)} | {best / seconds[OURS]:.1f} |"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--num-experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--whole-tokens", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
