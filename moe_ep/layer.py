"""A Mixture-of-Experts layer in one object: dispatch, this rank's experts, combine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import NamedTuple

from torch import Tensor, nn
from typing_extensions import Self

from moe_ep.abandoned_round import abandoning
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.checks import check_type
from moe_ep.collectives import agree, attempt, by_rank
from moe_ep.communication import MoEEpCommunication
from moe_ep.config import CommunicationConfig
from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.errors import MoEEpConfigError
from moe_ep.experts.identity import IdentityConfig
from moe_ep.experts.kernel import KernelConfig, SplitKernel, resolve_kernel
from moe_ep.experts.weights import MoEWeightPack, gather_full, load_full, load_own
from moe_ep.params import MoEEpCommParams
from moe_ep.registry import AUTO, create_communication


@dataclass(frozen=True)
class SplitConfig:
    """What a layer is made of.

    comm: what moves the tokens: a registered backend's name, its config, "auto", or a communication
        that exists. Layers with equal params share one workspace in any case.
    kernel: what the experts are: a KernelConfig, or a registered kernel's name where it needs no
        settings.
    """

    comm: str | CommunicationConfig | MoEEpCommunication = AUTO
    kernel: str | KernelConfig = field(default_factory=IdentityConfig)


class MoEEpTensors(NamedTuple):
    """What a layer is given in one call, as one object; each as in MoEEpLayer.forward."""

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor | None = None
    output: Tensor | None = None


class MoEEpLayer(nn.Module):
    """The experts of one Mixture-of-Experts layer, spread over the ranks of a group.

    The router is the user's. Parameters are the rank's own experts: `state_dict` holds these alone.
    Gradients of them are complete, sums over the tokens of the whole group; see docs/training.md.
    It cannot be copied or pickled; its state dict can.

    communication: what moves the tokens.
    kernel: what the experts are.
    """

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        backend: SplitConfig | str | CommunicationConfig = AUTO,
        *,
        weights: MoEWeightPack | None = None,
    ) -> None:
        """Create the communication and the rank's own experts. Collective.

        bootstrap: the group; not used where `backend` holds a communication.
        params: as of the communication.
        backend: what moves the tokens, and what the experts are. A name or config of a
            communication means the identity, which checks that one alone.
        weights: the rank's own experts; None: initialised at random, on each rank by its own
            generator (`load_full_state_dict` gives those of another run or of one process).

        Raises as `create_communication`. For the experts, on all ranks together, with every rank's
        reason: KeyError listing the names for an unknown kernel, TypeError and MoEEpConfigError for
        settings or weights that do not fit, also for a bias that the kernel has no place for,
        MoEEpConfigError where the ranks disagree.
        """
        super().__init__()
        split = backend if isinstance(backend, SplitConfig) else SplitConfig(comm=backend)
        self._owns_communication = not isinstance(split.comm, MoEEpCommunication)
        if isinstance(split.comm, MoEEpCommunication):
            self.communication = split.comm
        else:
            self.communication = create_communication(bootstrap, params, split.comm)
        try:
            self.kernel = self._agreed_kernel(params, split.kernel, weights)
        except BaseException:
            self.destroy()
            raise

    def forward(
        self,
        hidden_states: Tensor | MoEEpTensors,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        runtime_max_tokens_per_rank: int | None = None,
    ) -> Tensor:
        """Return for each token the weighted sum of its experts, [n, hidden_size]. Collective.

        hidden_states: [n, hidden_size] in `params.token_dtype`, or all tensors as MoEEpTensors,
            with an `output` to write into, which is then returned.
        topk_ids: [n, top_k] int32 or int64, global expert ids; negative is padding.
        topk_weights: [n, top_k] float32; None: every weight is 1.
        runtime_max_tokens_per_rank: as of `MoEEpCommunication.dispatch`.

        Partial sums over a rank's experts are rounded to the token dtype, and those of the ranks
        added in float32, in ascending order. Raises as dispatch and combine. Where the experts
        raise, or what they return is refused, the other ranks get MoEEpAbandonedError.
        """
        if isinstance(hidden_states, MoEEpTensors):
            if topk_ids is not None or topk_weights is not None:
                raise TypeError("topk_ids must be in the MoEEpTensors, got it beside them, too.")
            tensors = hidden_states
        elif topk_ids is None:
            raise TypeError("topk_ids must be given with hidden_states.")
        else:
            tensors = MoEEpTensors(hidden_states, topk_ids, topk_weights)
        received = self.communication.dispatch(
            tensors.hidden_states,
            tensors.topk_ids,
            tensors.topk_weights,
            runtime_max_tokens_per_rank=runtime_max_tokens_per_rank,
        )
        rest = partial(self._run_experts, received, tensors.output)
        return abandoning(self.communication, rest)

    def _run_experts(self, received: MoEEpDispatchResult, output: Tensor | None) -> Tensor:
        return self.communication.combine(self.kernel(received), output=output)

    def load_full_state_dict(self, state_dict: Mapping[str, Tensor], *, prefix: str = "") -> None:
        """Take the rank's own experts out of all experts' weights. Not collective.

        state_dict: for each parameter of the kernel `prefix` + its name, with all experts as the
            first dimension, of any device and any floating dtype but those of one byte, which
            need scales; what else is in it is ignored.

        Raises KeyError naming what is missing, MoEEpConfigError for a wrong shape, TypeError for a
        wrong type or dtype, with nothing changed.
        """
        load_full(self.kernel, state_dict, prefix)

    def full_state_dict(
        self, *, prefix: str = "", only_rank: int | None = None
    ) -> dict[str, Tensor] | None:
        """Return all experts' weights on the CPU, for `load_full_state_dict`. Collective.

        only_rank: the only rank that gets them; the others get None. None: all of them.

        Raises TypeError and MoEEpConfigError for an only_rank that is not in the group.
        """
        return gather_full(self.kernel, self.communication._comm, prefix, only_rank)

    def destroy(self) -> None:
        """Destroy the communication, if the layer has created it. Idempotent."""
        if self._owns_communication:
            self.communication.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.destroy()

    def _agreed_kernel(
        self, params: MoEEpCommParams, wanted: str | KernelConfig, weights: MoEWeightPack | None
    ) -> SplitKernel:
        """Make the kernel. Collective: all ranks have the same, or all raise."""
        communication, made = self.communication, []

        def make() -> str:
            if params != communication.params:
                raise MoEEpConfigError(
                    f"params must be those of the communication, {communication.params}, got "
                    f"{params}."
                )
            cls, config = resolve_kernel(wanted)
            kernel = cls(
                config,
                params,
                first_local_expert=communication.first_local_expert,
                num_local_experts=communication.num_local_experts,
                device=communication.device,
            )
            if weights is not None:
                check_type("weights", weights, MoEWeightPack)
                load_own(kernel, weights.tensors())
            made.append(kernel)
            return repr(config)

        configs = agree(communication._comm, attempt(make), what="creating the experts")
        if len(set(configs)) > 1:
            raise MoEEpConfigError(
                f"the ranks disagree about the experts: {by_rank(dict(enumerate(configs)))}."
            )
        return made[0]
