"""What do the backends over shared memory have in common? A workspace, sized before it is there."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_ep import _native, cuda_support, shared_gpus
from moe_ep._native import FifoGeometry, Geometry
from moe_ep.bootstrap import BootstrapConfig
from moe_ep.checks import check_type
from moe_ep.communication import MoEEpCommunication
from moe_ep.config import CommunicationConfig
from moe_ep.params import MoEEpCommParams
from moe_ep.sharing import memory_kind
from moe_ep.workspaces import Workspace


class SharedMemoryAlltoAll(MoEEpCommunication):
    """A backend derives from this class and sets `_min_capability`, `_layout_of`, `_join`."""

    supports_cuda_graph = True
    supports_torch_compile = True
    _has_graph_ops = True
    one_host_only = True
    _min_capability: ClassVar[cuda_support.Capability]
    """Of CUDA devices, and of the code for them."""

    @classmethod
    def unsupported_reason(cls, device: torch.device | None = None) -> str | None:
        """Return why it cannot run on `device` of this machine, None if it can. No collective."""
        return cuda_support.reason_against(cls.backend_name, cls._min_capability, device)

    @classmethod
    def estimate_workspace_bytes(
        cls,
        params: MoEEpCommParams,
        ep_size: int,
        config: CommunicationConfig,
        *,
        device: int | str | torch.device | None = None,
    ) -> int:
        check_type("config", config, cls.config_type)
        where = BootstrapConfig(1, 0, device=device).torch_device
        layout = cls._layout_of(params, ep_size, config, where)
        return _native.mapped_bytes(memory_kind(where), layout.segment_bytes)

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        params: MoEEpCommParams,
        config: CommunicationConfig,
        **settings: int,
    ) -> None:
        """Settings: of MoEEpCommunication."""
        check_type("config", config, self.config_type)
        super().__init__(bootstrap, params, config, **settings)
        shared_gpus.warn_of_overlapping_shares(self._gpu_shares, self.ep_rank)
        spans_gpus = shared_gpus.are_several(self._gpu_shares)
        self._layout = self._layout_of(
            params, self.ep_size, config, self.device, spans_gpus=spans_gpus
        )
        self._geometry: list[int] = self._layout.fields()
        self._timeout_sec = config.timeout_sec
        with self._on_stream():
            self._enter(self._join(bootstrap, config))
        self._workspace: Tensor = self._shared.tensor

    @staticmethod
    @abc.abstractmethod
    def _layout_of(
        params: MoEEpCommParams,
        ep_size: int,
        config: Any,
        device: torch.device,
        *,
        spans_gpus: bool = True,
    ) -> Geometry | FifoGeometry:
        """Return what sizes the workspace, as the backend's geometry_of."""

    @abc.abstractmethod
    def _join(self, bootstrap: BootstrapConfig, config: Any) -> Workspace:
        """Return the workspace of `self._layout`, which others may have, too. Collective."""

    def _destroy(self) -> None:
        # The memory goes with the last object of the workspace, which waits for own rounds only:
        # peers keep their mappings of it until they destroy.
        del self._workspace
