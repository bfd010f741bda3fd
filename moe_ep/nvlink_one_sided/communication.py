"""Which one-sided backend is nvlink_one_sided? The one that needs no bulk-copy engine."""

from __future__ import annotations

from moe_ep.bootstrap import BootstrapConfig
from moe_ep.nvlink_one_sided.config import NVLinkOneSidedConfig
from moe_ep.nvlink_one_sided.kernels import KERNELS
from moe_ep.one_sided.communication import OneSidedAlltoAll
from moe_ep.params import MoEEpCommParams
from moe_ep.registry import register_communication


@register_communication("nvlink_one_sided", preference=6)
class NVLinkOneSidedAlltoAll(OneSidedAlltoAll):
    """The portable one-sided backend: rows are put by their source and got by the combine.

    It needs no bulk-copy engine, so that it runs on every GPU from compute capability 8.0 on; on
    the CPU, processes of one host. Small steps may go over the Lamport transport, whose data are
    their own flags, see NVLinkOneSidedConfig.lamport; others over the fence transport, for every
    size. All else is as it is for CakeAlltoAll: the workspace and who shares it, graphs, streams,
    views; and so are the bits of every result.
    """

    config_type = NVLinkOneSidedConfig
    _kernels = KERNELS
    _min_capability = (8, 0)  # the oldest that the kernels are compiled for

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        config: NVLinkOneSidedConfig | None = None,
    ) -> None:
        """Allocate and share the workspace, as CakeAlltoAll does. Collective."""
        super().__init__(bootstrap, params, NVLinkOneSidedConfig() if config is None else config)
