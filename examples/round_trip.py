"""One round on random data: dispatch, experts, combine. Checks itself.

python examples/round_trip.py                             # one process
torchrun --nproc-per-node=4 examples/round_trip.py        # four; a backend's name may follow
"""

import os
import sys

import torch

from moe_ep import BootstrapConfig, MoEEpCommParams, create_communication


def main(backend: str) -> None:
    bootstrap = BootstrapConfig.from_env() if "RANK" in os.environ else BootstrapConfig(1, 0)
    params = MoEEpCommParams(num_experts=16, top_k=4, max_tokens_per_rank=32, hidden_size=256)

    torch.manual_seed(bootstrap.rank)
    num_tokens = 20 + bootstrap.rank % 13  # every rank may have another number of tokens
    tokens = torch.randn(num_tokens, params.hidden_size, dtype=params.token_dtype)
    weights, ids = torch.randn(num_tokens, params.num_experts).softmax(dim=-1).topk(params.top_k)
    tokens, weights, ids = (data.to(bootstrap.torch_device) for data in (tokens, weights, ids))

    with create_communication(bootstrap, params, backend) as comm:
        received = comm.dispatch(tokens, ids, weights)
        # Expert e multiplies by e + 1. A row takes part in this rank's experts only.
        local = received.topk_ids - comm.first_local_expert
        mine = (local >= 0) & (local < comm.num_local_experts)
        factors = received.topk_weights * (received.topk_ids + 1)
        factors = factors.masked_fill(~mine, 0).sum(dim=-1, keepdim=True)
        combined = comm.combine((received.hidden_states * factors).to(params.token_dtype))

    expected = tokens * (weights * (ids + 1)).sum(dim=-1, keepdim=True)
    torch.testing.assert_close(combined, expected.to(params.token_dtype), rtol=0.03, atol=0.03)
    print(f"PASS: rank {comm.ep_rank} of {comm.ep_size}, {comm.backend_name}, {num_tokens} tokens")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:] or ["auto"])
