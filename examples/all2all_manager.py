"""moe_ep as the all-to-all manager of an inference engine, after the manner of vLLM and SGLang.

Such engines call their Mixture-of-Experts layers in three steps: *prepare* brings the tokens to the
experts' ranks, the engine's own kernel runs this rank's experts on what arrived, *finalize* brings
the results back. MoEEpAll2AllManager is an object for the whole engine, and one of MoEEpExperts
stands in each layer. docs/integration.md says which method of an engine calls what.

    torchrun --nproc-per-node=2 examples/all2all_manager.py     # shows it with experts in torch
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    create_communication,
)


@dataclass(frozen=True)
class PreparedTokens:
    """What the engine's kernel gets: rows [R * tpr, hidden_size], of which rank s has sent the
    first `recv_token_counts[s]` of its block of tpr.

    topk_ids: [R * tpr, top_k] int32, counted from this rank's first expert; -1 for picks of other
        ranks' experts and in rows without a token.
    topk_weights: [R * tpr, top_k] float32; of picks that are -1 unspecified.
    """

    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    recv_token_counts: Tensor


class MoEEpAll2AllManager:
    """Owns the communications of an engine: one for each shape of layer, for all of these in turn.

    Memory: the communications of one shape have one workspace, allocated when the first layer of it
    is made, which is while the engine loads its model and all ranks do.
    """

    def __init__(self, ep_group: dist.ProcessGroup, device: torch.device, **options: Any) -> None:
        """ep_group: the engine's expert-parallel group. options: of `create_communication`."""
        self._bootstrap = BootstrapConfig.from_process_group(ep_group, device=device)
        self._options = {"backend": "auto", **options}
        self._communications: dict[MoEEpCommParams, MoEEpCommunication] = {}

    def get_handle(self, params: MoEEpCommParams) -> MoEEpExperts:
        """Return what a layer calls. Collective for the first layer of a shape."""
        if params not in self._communications:
            made = create_communication(self._bootstrap, params, **self._options)
            self._communications[params] = made
        return MoEEpExperts(self._communications[params])

    def sleep(self) -> None:
        """Give the workspaces' memory back, between steps. Collective."""
        for communication in self._communications.values():
            communication.checkpoint_prepare()

    def wake_up(self) -> None:
        """Get it back, at the same addresses: CUDA graphs stay good. Collective."""
        for communication in self._communications.values():
            communication.checkpoint_restore()

    def destroy(self) -> None:
        """Free everything."""
        for communication in self._communications.values():
            communication.destroy()
        self._communications.clear()


class MoEEpExperts:
    """Prepare and finalize of one layer. A finalize follows each prepare, on all ranks."""

    def __init__(self, communication: MoEEpCommunication) -> None:
        self._communication = communication

    @property
    def max_num_tokens_per_rank(self) -> int:
        """The most tokens that a rank may prepare."""
        return self._communication.params.max_tokens_per_rank

    @property
    def num_local_experts(self) -> int:
        """How many experts this rank owns."""
        return self._communication.num_local_experts

    def prepare(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        hidden_states_scale: Tensor | None = None,
        max_tokens_of_step: int | None = None,
    ) -> PreparedTokens:
        """Send the step's tokens to their experts' ranks. Collective.

        hidden_states: [n, hidden_size], or quantised as the params say, with their scales.
        topk_weights, topk_ids: [n, top_k], of the router; a negative id is padding, as in rows that
            fill up a captured batch.
        max_tokens_of_step: the largest n of all ranks, where the engine knows it (data-parallel
            metadata); None: shapes are those of max_num_tokens_per_rank, as in captured graphs.
        """
        got = self._communication.dispatch(
            hidden_states,
            topk_ids,
            topk_weights.float(),
            hidden_states_scale=hidden_states_scale,
            runtime_max_tokens_per_rank=max_tokens_of_step,
        )
        local = got.topk_ids - self._communication.first_local_expert
        is_local = (local >= 0) & (local < self.num_local_experts)
        assert got.topk_weights is not None  # they were sent
        return PreparedTokens(
            got.hidden_states,
            got.hidden_states_scale,
            torch.where(is_local, local, -1),
            got.topk_weights,
            got.recv_token_counts,
        )

    def output_buffer(self) -> Tensor | None:
        """Return memory for the kernel to write its result to, which saves finalize a copy; None
        where the backend has none."""
        return self._communication.get_combine_input_buffer()

    def finalize(self, expert_output: Tensor, output: Tensor | None = None) -> Tensor:
        """Return [n, hidden_size]: for each token the sum over the ranks. Collective.

        expert_output: [R * tpr, hidden_size], weighted and summed over this rank's experts; rows
            without a token are not read.
        """
        return self._communication.combine(expert_output, output=output)


def run_experts(one: PreparedTokens, matrices: Tensor) -> Tensor:
    """Stand in for the engine's kernel: an expert is a matrix, [hidden_size, hidden_size]."""
    total = torch.zeros_like(one.hidden_states, dtype=torch.float32)
    for expert, matrix in enumerate(matrices):
        row, slot = (one.topk_ids == expert).nonzero(as_tuple=True)
        made = (one.hidden_states[row] @ matrix).float() * one.topk_weights[row, slot, None]
        total.index_add_(0, row, made)
    return total.to(one.hidden_states.dtype)


def main() -> int:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    params = MoEEpCommParams(8, 2, 16, 32, dtype=torch.float32)
    random = torch.Generator().manual_seed(0)
    matrices = torch.randint(-2, 3, (8, 32, 32), generator=random).float()
    tokens = torch.randint(-2, 3, (ranks, 16, 32), generator=random).float()[rank, : 16 - rank]
    weights, ids = torch.rand(ranks, 16, 8, generator=random)[rank, : 16 - rank].topk(2)
    weights = (8 * weights).round() / 8  # exact in every order

    manager = MoEEpAll2AllManager(dist.group.WORLD, torch.device("cpu"))
    layers = [manager.get_handle(params) for _ in range(3)]
    first = layers[0]._communication.first_local_expert
    own = matrices[first : first + layers[0].num_local_experts]
    right = True
    for step in range(2):
        for layer in layers:
            prepared = layer.prepare(tokens, weights, ids, max_tokens_of_step=16)
            output = layer.finalize(run_experts(prepared, own))
            wanted = torch.einsum("nh,nkhj,nk->nj", tokens, matrices[ids], weights)
            right &= torch.equal(output, wanted)
        if step == 0:
            manager.sleep()
            manager.wake_up()
    manager.destroy()
    print(
        f"{'PASS' if right else 'FAIL'}: rank {rank} of {ranks}, {len(layers)} layers", flush=True
    )
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit("start it with: torchrun --nproc-per-node=2 examples/all2all_manager.py")
    raise SystemExit(main())
