"""Which backends does the contract suite run on, and where? A new backend adds a line to `ALL`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import parent_process
from types import ModuleType

import pytest
import torch

from moe_ep import (
    CakeAlltoAll,
    MoEEpCommParams,
    MoEEpCommunication,
    NVLinkOneSidedAlltoAll,
    NVLinkTwoSidedAlltoAll,
    TorchDistAlltoAll,
)
from moe_ep._native import Geometry
from moe_ep.one_sided.config import OneSidedConfig
from moe_ep.one_sided.workspace import geometry_of
from tests.gpu_cases import GPUS
from tests.ranks.devices import CPU, NCCL, ONE_GPU, SPREAD, unavailable_reason

USUAL = (CPU, ONE_GPU, NCCL)
EVERYWHERE = (CPU, *GPUS)
SHARED_GPUS = (ONE_GPU, SPREAD)


@dataclass(frozen=True)
class Backend:
    """A backend under test, and what of the contract it offers beyond what all must.

    masks: active_rank_mask.
    extra_bytes: extra_payload_bytes_per_token.
    statistics: eplb_stats_num_experts.
    workspace: has memory that is kept between rounds.
    zero_copy: get_combine_input_buffer returns memory.
    pdl: enable_pdl.
    low_precision: use_low_precision_combine.
    lamport: lamport and lamport_max_tokens.
    one_sided: it is on the one-sided transport: `kernels` are as those of cake.
    interruptible: a wait for a peer ends at Ctrl-C at once, and not only with its budget.
    devices: where it runs, of tests.ranks.devices.
    """

    name: str
    communication: type[MoEEpCommunication]
    masks: bool = False
    extra_bytes: bool = False
    statistics: bool = False
    workspace: bool = False
    zero_copy: bool = False
    pdl: bool = False
    low_precision: bool = False
    lamport: bool = False
    one_sided: bool = False
    interruptible: bool = False
    devices: tuple[str, ...] = (CPU,)

    def __str__(self) -> str:
        return self.name

    @property
    def kernels(self) -> ModuleType:
        """What its ops do on a bare workspace."""
        package = self.communication.__module__.rpartition(".")[0]
        return importlib.import_module(f"{package}.kernels")

    def geometry_of(
        self,
        params: MoEEpCommParams,
        ep_size: int,
        device: torch.device,
        *,
        spans_gpus: bool = True,
        low_precision: bool = False,
    ) -> Geometry:
        """What sizes a workspace on the one-sided transport, with the settings that are usual."""
        config_type = self.communication.config_type
        assert issubclass(config_type, OneSidedConfig)
        config = config_type(use_low_precision_combine=low_precision)
        return geometry_of(params, ep_size, config, device, spans_gpus=spans_gpus)

    def takes_rows_in_place(
        self, dtype: torch.dtype, *, one_gpu: bool, low_precision: bool = False
    ) -> bool:
        """Whether experts may write where combine takes its rows. one_gpu: all ranks are on it."""
        if not low_precision:
            return self.zero_copy
        return self.name == "cake" and one_gpu and dtype == torch.bfloat16


def _one_sided(
    name: str, communication: type[MoEEpCommunication], *, lamport: bool = False
) -> Backend:
    return Backend(
        name,
        communication,
        masks=True,
        extra_bytes=True,
        statistics=True,
        workspace=True,
        zero_copy=True,
        pdl=True,
        low_precision=True,
        lamport=lamport,
        one_sided=True,
        interruptible=True,
        devices=(CPU, ONE_GPU, SPREAD),
    )


ALL = (
    _one_sided("cake", CakeAlltoAll),
    _one_sided("nvlink_one_sided", NVLinkOneSidedAlltoAll, lamport=True),
    Backend(
        "nvlink_two_sided",
        NVLinkTwoSidedAlltoAll,
        workspace=True,
        interruptible=True,
        devices=(CPU, ONE_GPU, SPREAD),
    ),
    Backend("torch_dist", TorchDistAlltoAll, statistics=True, devices=(CPU, NCCL)),
)


def named(name: str) -> Backend:
    """Return the backend of that name."""
    return next(backend for backend in ALL if backend.name == name)


@cache
def reason_against(backend: Backend, device: str) -> str | None:
    """Return why a backend cannot be tested there on this machine, or None."""
    if device == CPU:
        return None
    if parent_process() is not None:
        # A rank imports test modules for their bodies. To ask would initialise CUDA in it, before
        # it has been told its share of the GPU.
        return "asked by a rank"
    return unavailable_reason(device) or backend.communication.unsupported_reason(
        torch.device("cuda", 0)
    )


def on_each(
    *, having: str | None = None, named: str | None = None, devices: Sequence[str] = USUAL
) -> pytest.MarkDecorator:
    """Run a test with `backend` and `device` for each backend on each of its devices that this
    machine has. (tests/gpu/test_devices.py shows as skipped those that it has not.)

    having: the field of Backend that must be true.
    named: the only backend. For what is about its own kernels.
    devices: the only ones to run it on. On GPUs it carries the mark `gpu`. If this machine has
        none of them, the test is skipped with a reason.
    """
    pairs = [
        (backend, device)
        for backend in ALL
        if having is None or getattr(backend, having)
        if named is None or backend.name == named
        for device in backend.devices
        if device in devices
    ]
    cases = [
        pytest.param(backend, device, marks=_marks_of(device))
        for backend, device in pairs
        if reason_against(backend, device) is None
    ]
    if not cases:
        backend, device = pairs[0]
        skip = pytest.mark.skip(reason=f"{backend} on {device}: {reason_against(backend, device)}")
        cases = [pytest.param(backend, device, marks=[*_marks_of(device), skip])]
    return pytest.mark.parametrize(("backend", "device"), cases, ids=str)


def _marks_of(device: str) -> list[pytest.MarkDecorator]:
    return [] if device == CPU else [pytest.mark.gpu]


every_backend = on_each()
every_backend_spread_too = on_each(devices=EVERYWHERE)
# What is about the CPU alone; the test says why.
on_the_cpu = on_each(devices=(CPU,))
# Where a wait for a peer is the backend's own. NCCL's names no peer, and its watchdog may end the
# process first.
naming_silent_peers = on_each(devices=(CPU, ONE_GPU))
on_shared_gpus = on_each(devices=SHARED_GPUS)
one_sided_names = pytest.mark.parametrize("backend", [one.name for one in ALL if one.one_sided])
