"""Expert-parallel inference of a Hugging Face transformers MoE model, checked and timed.

    python examples/hf_moe_inference.py                          # starts 4 ranks on this machine
    torchrun --nproc-per-node=4 examples/hf_moe_inference.py     # the same
    python tools/mps.py torchrun ...                             # where ranks share a GPU

A small Qwen3-MoE with random weights reads English text, each rank another piece of it. The experts
of every layer are spread over the ranks: moe_ep dispatches each token to the ranks that own its
experts and combines the results. The logits must equal those of the same model in one process, and
the exchange is timed against transformers' own `all_to_all`.

The ranks run on GPUs where they can (`--device auto`), on the CPU elsewhere. More ranks than GPUs
share them under an MPS daemon, which this file starts and ends.

Exit code: 0 if the logits agree, 1 if not or if a rank fails, 2 for options that cannot work.
Needs `pip install "moe_ep[hf]"`. Your own script needs two lines, see
moe_ep.integrations.transformers; the folder hf_moe holds the other parts of this one.
"""

from __future__ import annotations

import argparse
import logging
import os

import torch.distributed as dist
from hf_moe.options import parse_options
from hf_moe.places import daemon_for
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> int:
    options = parse_options()
    if not dist.is_torchelastic_launched():
        return start_ranks(options)
    # Not at the top: transformers takes seconds to import, and only the ranks use it.
    from hf_moe.rank import leave, run_rank

    return leave(run_rank(options))


def start_ranks(options: argparse.Namespace) -> int:
    """Run this file under torchrun. Returns the exit code of the first rank that failed, else 0."""
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // options.ranks)))
    # A failed rank says itself what went wrong; torchrun would repeat it in thirty lines.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    arguments = [f"--{name}={value}" for name, value in vars(options).items()]
    try:
        with daemon_for(options):
            torchrun.main(
                ["--standalone", f"--nproc-per-node={options.ranks}", __file__, *arguments]
            )
    except ChildFailedError as error:
        return int(error.get_first_failure()[1].exitcode)
    except SignalException as error:  # Ctrl-C, for one; torchrun has ended the ranks
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
