"""Which one-sided backend is cake? The one that moves many rows by the bulk-copy engine."""

from __future__ import annotations

from moe_ep.bootstrap import BootstrapConfig
from moe_ep.cake.config import CakeAlltoAllConfig
from moe_ep.cake.kernels import KERNELS
from moe_ep.one_sided.communication import OneSidedAlltoAll
from moe_ep.params import MoEEpCommParams
from moe_ep.registry import register_communication


@register_communication("cake", preference=10)
class CakeAlltoAll(OneSidedAlltoAll):
    """The fused one-sided backend: every rank writes into the others' memory and reads from it.

    On CUDA: one kernel a call, on torch's current stream or the bootstrap's; a round can be
    captured in a CUDA graph. On the CPU: processes of one host over anonymous shared memory. One
    workspace of `estimate_workspace_bytes(params, ep_size, config)` bytes per rank, allocated at
    construction, none per round.

    Objects of the same group share one workspace and take turns, a round each, if the sizes of
    their rows and rounds, or the `arena` that they name, and `enable_rank_mask`, the device and the
    bootstrap's stream are the same.
    The group is that of comm_backend, else the process group (that given or the default one), else
    this process alone. What the device records about one object's round may be raised by another's
    call, and a failure that breaks one breaks all. Rounds on different streams must be ordered as
    those of one object.

    What dispatch returns are views of the workspace in eager code. In compiled graphs they are
    copies, or views where all that is made of them goes into the combine of the round.
    """

    config_type = CakeAlltoAllConfig
    _kernels = KERNELS
    _min_capability = (9, 0)  # the first with bulk copies between shared and global memory

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        config: CakeAlltoAllConfig | None = None,
    ) -> None:
        """Allocate and share the workspace. Collective; a failure on one rank raises on all, with
        every reason. Ranks that share a GPU and have more of it together than there is get a
        RuntimeWarning."""
        super().__init__(bootstrap, params, CakeAlltoAllConfig() if config is None else config)
