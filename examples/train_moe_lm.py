"""Train a small Mixture-of-Experts language model from scratch, expert-parallel, and check it.

    torchrun --nproc-per-node=4 examples/train_moe_lm.py                 # 4 ranks share the experts
    torchrun --nproc-per-node=4 examples/train_moe_lm.py --ep-size 2     # 2 x 2: two replicas

The model predicts the bytes of the Python reference that the standard library ships. Its experts
are spread over the ranks of the mesh's "ep" dimension, and replicated along "dp"; the rest of the
model is replicated everywhere. Rank 0 trains the same model alone for the first steps: the losses
must agree. In the end all ranks write a text together.

Exit code: 0 if the losses agree, 1 if not. --plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from moe_lm.model import LENGTH, ByteModel
from moe_lm.plot import save_plot
from moe_lm.text import Batches
from moe_lm.training import Trainer, sample

from moe_ep import BootstrapConfig

TOLERANCE = 1e-5
"""Largest difference of a loss, relative. Both runs add the same float32 numbers in another order,
which moved no loss of 50 steps by more than 2e-7; as the weights part, a token may change its
expert. A gradient that is left out, or counted twice, moves the next losses by 1e-3 and more."""


def main() -> int:
    options = parse_options()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ep_size = options.ep_size or ranks
    mesh = dist.init_device_mesh("cpu", (ranks // ep_size, ep_size), mesh_dim_names=("dp", "ep"))
    torch.set_num_threads(1)

    batches = Batches(options.sequences, LENGTH)
    bootstrap = BootstrapConfig.from_device_mesh(mesh["ep"], device="cpu")
    most = -(-options.sequences // ranks) * LENGTH
    model = ByteModel(bootstrap, options.backend, most)
    replicas = mesh["dp"].get_group() if ranks > ep_size else None
    trainer = Trainer(model, batches, rank, ranks, replicas)
    losses = []
    for step, loss in enumerate(trainer.losses(options.steps)):
        losses.append(loss)
        if rank == 0 and (step % 20 == 0 or step == options.steps - 1):
            print(f"step {step:4}  loss {loss:.4f}", flush=True)
    text = sample(model, "The statement ", options.sample)

    agree = torch.tensor(True)
    if rank == 0:
        alone = losses_of_one_process(batches, min(options.checked, options.steps))
        worst = max(abs(a - b) / b for a, b in zip(losses, alone, strict=False))
        agree = torch.tensor(worst <= TOLERANCE)
        if options.plot is not None:
            save_plot(options.plot, {"one process": alone, f"{ranks} ranks": losses})
        print(f"\n{text}\n")
        print(
            f"{'PASS' if agree else 'FAIL'}: the losses of {ranks} ranks ({ranks // ep_size} x "
            f"{ep_size}) and of one process differ by at most {worst:.1e} of themselves in "
            f"{len(alone)} steps (tolerance {TOLERANCE:.0e})",
            flush=True,
        )
    dist.broadcast(agree, 0)
    for layer in model.layers():
        layer.destroy()
    dist.destroy_process_group()
    return 0 if agree else 1


def losses_of_one_process(batches: Batches, steps: int) -> list[float]:
    """The same training with all experts in this process."""
    alone = dist.new_group([0], use_local_synchronization=True)
    bootstrap = BootstrapConfig(1, 0, process_group=alone, device="cpu")
    most = batches(0, 0, 1)[0].numel()
    model = ByteModel(bootstrap, "torch_dist", most)
    return list(Trainer(model, batches, 0, 1, None).losses(steps))


def parse_options() -> argparse.Namespace:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
    parser.add_argument("--checked", type=int, default=50, help="of them compared (default: 50)")
    parser.add_argument("--sequences", type=int, default=32, help="in a batch (default: 32)")
    parser.add_argument("--sample", type=int, default=200, help="bytes written in the end")
    parser.add_argument("--ep-size", type=int, help="ranks that share the experts (default: all)")
    parser.add_argument("--backend", default="auto", help="what moves the tokens (default: auto)")
    parser.add_argument("--plot", type=Path, help="where to write the losses as a PNG")
    options = parser.parse_args()
    if options.ep_size is not None and (options.ep_size < 1 or ranks % options.ep_size):
        parser.error(f"--ep-size must divide the {ranks} ranks, got {options.ep_size}")
    if options.sequences < ranks:
        parser.error(f"--sequences must be at least the {ranks} ranks, got {options.sequences}")
    if min(options.steps, options.checked) < 1:
        parser.error("--steps and --checked must be 1 or more")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
