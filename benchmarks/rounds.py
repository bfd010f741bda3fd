"""What is one round? Dispatch and combine of one backend, and the proof that it was right."""

from __future__ import annotations

from typing import Any

import torch
from places import Place
from torch import Tensor
from variants import Variant
from workload import Workload

from moe_ep import BootstrapConfig, MoEEpDispatchResult, create_communication
from moe_ep.cake.kernels import active_rank_mask
from moe_ep.one_sided.communication import OneSidedAlltoAll


class Rounds:
    """A communication and its buffers. The experts are left out of a round: what they return for
    these inputs lies ready, where combine reads it or in ordinary memory.

    All device work goes to the current stream.
    """

    def __init__(self, variant: Variant, workload: Workload, place: Place) -> None:
        """Collective."""
        case = workload.case
        self.variant = variant
        self._work = workload
        bootstrap = BootstrapConfig(place.ranks, place.rank, device=place.device)
        self._comm = create_communication(
            bootstrap, case.params, variant.backend, **variant.options(case.num_experts)
        )
        self._mask: dict[str, Any] = {}
        if variant.mask:
            mask = active_rank_mask(range(place.ranks), place.ranks, place.device)
            self._mask = {"active_rank_mask": mask}
        self._stats: dict[str, Any] = {}
        self._all_stats: Tensor | None = None
        if variant.stats:
            ranks = torch.arange(place.ranks, dtype=torch.int32, device=place.device)
            experts = torch.arange(case.num_experts, dtype=torch.int32, device=place.device)
            self._all_stats = ranks[:, None] + experts
            self._stats = {"eplb_local_stats": self._all_stats[place.rank]}
        # In memory that has been written before: on the CPU the first touch of fresh pages costs
        # more than the exchange itself.
        self._output = torch.zeros(
            case.tokens, case.hidden_size, dtype=case.params.token_dtype, device=place.device
        )
        self._expert_output: Tensor | None = None
        self.received: MoEEpDispatchResult | None = None
        """What the last dispatch that Python issued returned."""

    @property
    def can_be_captured(self) -> bool:
        return self._comm.supports_cuda_graph

    @property
    def stays_in_workspace(self) -> bool:
        """Whether every dispatch leaves what it has received where the first one did, which Python
        issued: there it can be looked at."""
        return isinstance(self._comm, OneSidedAlltoAll)

    def dispatch(self) -> None:
        self.received = self._dispatch()

    def combine(self) -> None:
        self._comm.combine(self._combine_input(), output=self._output, **self._mask)

    def functional_round(self) -> tuple[MoEEpDispatchResult, Tensor]:
        """Run a round that keeps nothing: return what was received, and the sums in new memory."""
        received = self._dispatch()
        return received, self._comm.combine(self._combine_input(), **self._mask)

    def keep_addresses(self) -> None:
        """Promise torch.compile that what rounds read stays where it is: they need no copy of it,
        as of what a graph has made itself."""
        work = self._work
        read = [work.hidden_states, work.topk_ids, work.topk_weights, work.hidden_states_scale]
        for tensor in (*read, self._combine_input(), *self._mask.values(), *self._stats.values()):
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)

    def verify(self) -> None:
        """Run one round, experts included, and check it. Collective.

        Leaves the experts' outputs for the rounds to come, and poison in place of all that was
        received and returned: a round that writes nothing is then found out by `verify_last`.
        """
        self.dispatch()
        received = self.received
        assert received is not None
        self._check_dispatch(received)
        self._work.evaluate_experts(into=self._combine_input())
        poison(received)
        self._output.fill_(float("nan"))
        self.combine()
        self._work.check_combine(self._output, fp8_combine=self.variant.fp8_combine)
        self._output.fill_(float("nan"))

    def verify_last(self, received: MoEEpDispatchResult | None, sums: Tensor | None = None) -> None:
        """Check every element that the last round left, before any rank starts another.

        received: what that round's dispatch returned.
        sums: what its combine returned; None: what `combine` wrote last.
        """
        assert received is not None, "no round was run"
        self._check_dispatch(received)
        sums = self._output if sums is None else sums
        self._work.check_combine(sums, fp8_combine=self.variant.fp8_combine)

    def check(self) -> None:
        """Raise what the device recorded."""
        self._comm.check()

    def close(self) -> None:
        """Collective."""
        self.received = None
        self._comm.destroy()

    def _dispatch(self) -> MoEEpDispatchResult:
        work = self._work
        return self._comm.dispatch(
            work.hidden_states,
            work.topk_ids,
            work.topk_weights,
            hidden_states_scale=work.hidden_states_scale,
            **self._mask,
            **self._stats,
        )

    def _check_dispatch(self, received: MoEEpDispatchResult) -> None:
        self._work.check_dispatch(received)
        if self._all_stats is not None:
            gathered = received.eplb_gathered_stats
            assert gathered is not None, "dispatch returned no statistics"
            assert torch.equal(gathered, self._all_stats), "statistics are not those sent"

    def _combine_input(self) -> Tensor:
        if self.variant.zero_copy:
            buffer = self._comm.get_combine_input_buffer(self._output.dtype)
            if buffer is not None:
                return buffer
        if self._expert_output is None:
            rows = self._comm.ep_size * len(self._output)
            self._expert_output = self._output.new_zeros(rows, self._output.shape[1])
        return self._expert_output


def poison(received: MoEEpDispatchResult) -> None:
    """Overwrite what a consumer may overwrite between dispatch and combine."""
    received.hidden_states.view(torch.uint8).fill_(0xFF)
    if received.hidden_states_scale is not None:
        received.hidden_states_scale.view(torch.uint8).fill_(0xFF)
    received.topk_ids.fill_(0x55555555)
    if received.eplb_gathered_stats is not None:
        received.eplb_gathered_stats.fill_(-1)
    if received.topk_weights is not None:
        received.topk_weights.fill_(float("nan"))
