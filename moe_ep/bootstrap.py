"""Which processes form the expert-parallel group, which is this one, and on which device?"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

from moe_ep.collectives import (
    CommBackend,
    SingleRankComm,
    TorchDistributedComm,
    as_comm_backend,
)
from moe_ep.errors import MoEEpConfigError
from moe_ep.launchers import detect_launch, halves_of_launches
from moe_ep.limits import DEFAULT_TIMEOUT_SEC
from moe_ep.peer_exchange import has_gloo

if TYPE_CHECKING:
    from typing_extensions import Self

# Functions of this module have as a default argument the default group of the moment when it is
# loaded, which torch._dynamo does. Loaded before there is one, they hold none, whose threads would
# outlive `destroy_process_group` and could abort the exit.
if not dist.is_initialized():
    import torch.distributed.nn.functional


@dataclass(frozen=True)
class BootstrapConfig:
    """The expert-parallel group as one of its ranks sees it. Touches no driver context and creates
    no group by itself.

    world_size, rank: of the expert-parallel group, which may be a part of all processes (then pass
        `process_group`).
    stream: CUDA stream handle to work on; 0: torch's current stream. Must be 0 on the CPU.
    auto_bootstrap: create torch.distributed's default group from the launcher's environment when
        none exists.
    nccl_comm: refused; pass `process_group`.
    process_group: the group; its size and this process's rank in it must be `world_size` and
        `rank`. None: the default group.
    tcp_store: torch.distributed store over which `auto_bootstrap` creates the default group; None:
        the environment's.
    device: None: `cuda:LOCAL_RANK` where torch and the machine have CUDA, else the CPU; an int is a
        CUDA ordinal; a string or torch.device as in torch.

    Raises TypeError and MoEEpConfigError.
    """

    world_size: int
    rank: int
    stream: int = 0
    auto_bootstrap: bool = True
    nccl_comm: Any = None
    process_group: dist.ProcessGroup | None = None
    tcp_store: Store | None = None
    device: int | str | torch.device | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("world_size", "rank", "stream"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__}).")
        if self.world_size < 1:
            raise MoEEpConfigError(f"world_size must be at least 1, got {self.world_size}.")
        if not 0 <= self.rank < self.world_size:
            raise MoEEpConfigError(
                f"rank must be 0..{self.world_size - 1} (world_size={self.world_size}), got "
                f"{self.rank}."
            )
        if self.nccl_comm is not None:
            raise MoEEpConfigError(
                "nccl_comm must be None: raw NCCL communicators are not used. "
                "Pass the torch.distributed group of the same ranks as process_group."
            )
        if not isinstance(self.auto_bootstrap, bool):
            raise TypeError(f"auto_bootstrap must be a bool, got {self.auto_bootstrap!r}.")
        if self.process_group is not None:
            _require_group_matches(self, self.process_group, "process_group")
        store = self.tcp_store
        if store is not None and not isinstance(store, Store):
            raise TypeError(f"tcp_store must be a torch.distributed Store, got {store!r}.")
        device = _resolve_device(self.device, self.world_size)
        if self.stream != 0 and device.type != "cuda":
            raise MoEEpConfigError(
                f"stream must be 0 on {device}, which has no streams, got {self.stream}."
            )
        object.__setattr__(self, "device", device)

    @property
    def torch_device(self) -> torch.device:
        """The device, resolved: "cpu", or "cuda" with an index."""
        assert isinstance(self.device, torch.device)  # __post_init__ resolved it
        return self.device

    @classmethod
    def from_env(cls, *, device: int | str | torch.device | None = None) -> Self:
        """Return the group of all processes that the launcher started.

        Understands torchrun, Open MPI (mpirun, prterun), MPICH/Hydra (PMI) and Slurm's srun, also
        with PMIx. Raises MoEEpConfigError where none of them started this process, or where their
        variables are inconsistent.
        """
        launch = detect_launch(os.environ)
        if launch is None:
            raise MoEEpConfigError(
                "no launcher found in the environment (RANK and WORLD_SIZE of torchrun, or the "
                f"variables of Open MPI, MPICH/Hydra or Slurm){halves_of_launches(os.environ)}: "
                "start with torchrun, or pass world_size and rank."
            )
        return cls(launch.size, launch.rank, device=device)

    @classmethod
    def from_process_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        device: int | str | torch.device | None = None,
    ) -> Self:
        """Return the group of a torch.distributed process group; None: the default group.

        Raises MoEEpConfigError where torch.distributed is not initialised or this process is not in
        the group.
        """
        if not dist.is_initialized():
            raise MoEEpConfigError(
                "torch.distributed has no default group: call torch.distributed.init_process_group "
                "first, or use BootstrapConfig.from_env()."
            )
        chosen = dist.group.WORLD if group is None else group
        if not isinstance(chosen, dist.ProcessGroup):
            raise MoEEpConfigError(
                "group must be a ProcessGroup that contains this process (global rank "
                f"{dist.get_rank()}), got {chosen!r}."
            )
        return cls(
            dist.get_world_size(chosen), dist.get_rank(chosen), process_group=chosen, device=device
        )

    @classmethod
    def from_device_mesh(
        cls, mesh: DeviceMesh, *, device: int | str | torch.device | None = None
    ) -> Self:
        """Return the group of a one-dimensional device mesh, such as `mesh["ep"]`.

        device: None: the CPU for a CPU mesh, else as in the constructor.
        Raises MoEEpConfigError for a mesh of more dimensions, TypeError for anything else.
        """
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}.")
        if mesh.ndim != 1:
            raise MoEEpConfigError(
                f"mesh must have one dimension, got {mesh.ndim} ({mesh.mesh_dim_names}): slice it, "
                "as in mesh['ep']."
            )
        if device is None and mesh.device_type == "cpu":
            device = "cpu"
        return cls.from_process_group(mesh.get_group(), device=device)

    def group(self) -> dist.ProcessGroup:
        """Return the torch.distributed group, creating the default group if `auto_bootstrap` says
        so. Collective then.

        Raises MoEEpConfigError where there is none, where its size or rank is not this config's, or
        where the environment does not say how to create one.
        """
        if self.process_group is not None:
            return self.process_group
        if not dist.is_initialized():
            if not self.auto_bootstrap:
                raise MoEEpConfigError(
                    "torch.distributed has no default group and auto_bootstrap is False: "
                    "call torch.distributed.init_process_group, or pass process_group."
                )
            _create_default_group(self)
        group = dist.group.WORLD
        assert group is not None  # is_initialized() says so
        _require_group_matches(self, group, "torch.distributed's default group")
        return group

    def comm(
        self, comm_backend: Any = None, *, timeout_sec: float = DEFAULT_TIMEOUT_SEC
    ) -> CommBackend:
        """Return what the group agrees over: `comm_backend` if given, else torch.distributed over
        `group()`.

        timeout_sec: the wall-clock seconds that one collective over torch.distributed waits.
        Raises MoEEpConfigError where its size or rank is not this config's.
        """
        if comm_backend is not None:
            comm = as_comm_backend(comm_backend, timeout_sec=timeout_sec)
            _require_matches(self, comm.get_size(), comm.get_rank(), "comm_backend")
            return comm
        if self.world_size == 1:
            return SingleRankComm()
        group = self.group()
        if self.torch_device.type == "cpu" and not has_gloo(group):
            raise MoEEpConfigError(
                f"the process group has the backend {dist.get_backend_config(group)}, and "
                f"device={self.device} needs Gloo: "
                'create the group with backend="gloo" or "cpu:gloo,cuda:nccl".'
            )
        return TorchDistributedComm(group, timeout_sec=timeout_sec)


def _require_group_matches(config: BootstrapConfig, group: dist.ProcessGroup, name: str) -> None:
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{name} must be a torch.distributed ProcessGroup, got {type(group).__name__}."
        )
    _require_matches(config, group.size(), group.rank(), name)


def _require_matches(config: BootstrapConfig, size: int, rank: int, name: str) -> None:
    if (size, rank) != (config.world_size, config.rank):
        raise MoEEpConfigError(
            f"{name} has size {size} and rank {rank}, but world_size={config.world_size} and "
            f"rank={config.rank}. Describe the expert-parallel group only, and pass its "
            "process_group if it is a part of all ranks."
        )


def _create_default_group(config: BootstrapConfig) -> None:
    backend = "gloo" if config.torch_device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store = config.tcp_store
    if store is None and config.world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
    if store is None:
        _require_rendezvous(config)
    dist.init_process_group(
        backend,
        store=store,
        init_method="env://" if store is None else None,
        world_size=config.world_size,
        rank=config.rank,
    )


def _require_rendezvous(config: BootstrapConfig) -> None:
    """Check what would otherwise make the rendezvous wait for ranks that never come."""
    launch = detect_launch(os.environ)
    if launch is not None:
        _require_matches(config, launch.size, launch.rank, f"the launcher ({launch.launcher})")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise MoEEpConfigError(
            f"{' and '.join(missing)} must be set to create the default process group: the host of "
            "rank 0 and a free port there, equal on all ranks (torchrun sets them). Or pass "
            "process_group or tcp_store."
        )


def _resolve_device(device: int | str | torch.device | None, world_size: int) -> torch.device:
    if device is None:
        return _default_device(world_size)
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        raise TypeError(f"device must be an int, str, torch.device or None, got {device!r}.")
    try:
        resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError:  # torch knows no such device
        raise MoEEpConfigError(f"device must be a CPU or CUDA device, got {device!r}.") from None
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise MoEEpConfigError(f"device must be a CPU or CUDA device, got {resolved}.")
    count = _cuda_device_count()
    if resolved.index is None and count:
        resolved = torch.device("cuda", torch.cuda.current_device())
    if resolved.index is None or resolved.index >= count:
        raise MoEEpConfigError(f"device is {resolved}, but torch sees {count} CUDA devices here.")
    return resolved


def _default_device(world_size: int) -> torch.device:
    count = _cuda_device_count()
    if count == 0:
        return torch.device("cpu")
    launch = detect_launch(os.environ)
    local_rank = None if launch is None else launch.local_rank
    if local_rank is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        local_rank = torch.cuda.current_device()
    if local_rank is None and world_size == 1:
        local_rank = 0
    if local_rank is None:
        raise MoEEpConfigError(
            "device must be given: this machine has CUDA, and the environment does not say this "
            "process's LOCAL_RANK."
        )
    if local_rank >= count:
        raise MoEEpConfigError(
            f"device must be given: LOCAL_RANK is {local_rank}, but torch sees {count} CUDA "
            "devices here. Ranks that share one device pass its number as device."
        )
    return torch.device("cuda", local_rank)


def _cuda_device_count() -> int:
    # device_count asks NVML first and so creates no CUDA context.
    return torch.cuda.device_count() if torch.version.cuda else 0
