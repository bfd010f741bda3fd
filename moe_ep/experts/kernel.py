"""What is a kernel of a MoEEpLayer, and how does a name or a config become one?"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from moe_ep.dispatch_result import MoEEpDispatchResult
from moe_ep.errors import MoEEpConfigError
from moe_ep.params import MoEEpCommParams


@dataclass(frozen=True)
class KernelConfig:
    """Settings of a kernel, equal on all ranks. A kernel's own config derives from this and sets
    `kernel_name`."""

    kernel_name: ClassVar[str]


_Kernel = TypeVar("_Kernel", bound="SplitKernel")


class SplitKernel(nn.Module, abc.ABC):
    """What a rank does between dispatch and combine: its own experts, on the rows that it received.

    A kernel derives from this, sets `config_type`, and fills in `forward`. Every parameter has the
    rank's own experts as its first dimension: so the layer loads and gathers them.

    config: as given to the layer.
    params: of the communication.
    first_local_expert, num_local_experts: this rank's share; it may be none.
    """

    kernel_name: ClassVar[str]
    """Set by `register_split_kernel`."""
    config_type: ClassVar[type[KernelConfig]]

    def __init__(
        self,
        config: KernelConfig,
        params: MoEEpCommParams,
        *,
        first_local_expert: int,
        num_local_experts: int,
        device: torch.device,
    ) -> None:
        """Make the parameters, on `device` in `params.token_dtype`. Not collective.

        Raises MoEEpConfigError where config and params do not fit.
        """
        super().__init__()
        self.config = config
        self.params = params
        self.first_local_expert = first_local_expert
        self.num_local_experts = num_local_experts
        self.device = device

    @abc.abstractmethod
    def forward(self, received: MoEEpDispatchResult) -> Tensor:
        """Return [R * tpr, hidden_size] in `params.token_dtype`: for each received row the sum over
        its local experts, weighted. Rows without a token are not read.

        Reads nothing back to the host, so that it can be captured and compiled.
        """


_registry: dict[str, type[SplitKernel]] = {}


def register_split_kernel(name: str) -> Callable[[type[_Kernel]], type[_Kernel]]:
    """Return a class decorator that registers a kernel, also a third party's.

    The class derives from SplitKernel and has a `config_type` whose `kernel_name` is `name`.

    Raises MoEEpConfigError where the name is taken by another class or does not fit the config.
    """

    def register(cls: type[_Kernel]) -> type[_Kernel]:
        if cls.config_type.kernel_name != name:
            raise MoEEpConfigError(
                f"{cls.config_type.__name__}.kernel_name must be {name!r}, the registered name, "
                f"got {cls.config_type.kernel_name!r}."
            )
        taken = _registry.get(name)
        if taken is not None and taken is not cls:
            raise MoEEpConfigError(f"name {name!r} is taken by {taken.__name__}.")
        cls.kernel_name = name
        _registry[name] = cls
        return cls

    return register


def available_split_kernels() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_registry))


def resolve_kernel(
    kernel: str | KernelConfig,
) -> tuple[type[SplitKernel], KernelConfig]:
    """Return the class of a kernel and its config.

    Raises KeyError listing the names for an unknown one, TypeError for anything else that is not a
    kernel, or a name alone where settings are needed.
    """
    if not isinstance(kernel, str | KernelConfig):
        raise TypeError(f"kernel must be a name or a KernelConfig, got {type(kernel).__name__}.")
    name = kernel if isinstance(kernel, str) else kernel.kernel_name
    if name not in _registry:
        known = ", ".join(available_split_kernels())
        raise KeyError(f"unknown kernel {name!r}; registered are: {known}")
    cls = _registry[name]
    if not isinstance(kernel, str):
        if not isinstance(kernel, cls.config_type):
            raise TypeError(
                f"kernel must be a {cls.config_type.__name__}, got {type(kernel).__name__}."
            )
        return cls, kernel
    missing = dataclasses.MISSING
    needed = [
        f.name
        for f in dataclasses.fields(cls.config_type)
        if f.default is missing and f.default_factory is missing
    ]
    if needed:
        raise TypeError(
            f"kernel {name!r} needs settings: pass a {cls.config_type.__name__} with "
            f"{', '.join(needed)}."
        )
    return cls, cls.config_type()
