"""Which backends are there, and how does a name become a communication?"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from moe_ep.bootstrap import BootstrapConfig
from moe_ep.checks import check_type
from moe_ep.collectives import CommBackend, agree, attempt
from moe_ep.communication import MoEEpCommunication
from moe_ep.config import CommunicationConfig, require_int_in_range
from moe_ep.construction import (
    HostIdentity,
    own_reason_against,
    refuse_construction,
    unsupported_reasons,
)
from moe_ep.errors import MoEEpConfigError, MoEEpPlatformError
from moe_ep.limits import MAX_EP_SIZE
from moe_ep.params import MoEEpCommParams

AUTO = "auto"
"""Asks create_communication to choose; no backend can have this name."""

# What a rank needs, besides its bootstrap, to reach the others.
_COMM_SETTINGS = {"comm_backend", "timeout_sec"}

_Communication = TypeVar("_Communication", bound=MoEEpCommunication)


@dataclass(frozen=True)
class _Entry:
    communication: type[MoEEpCommunication]
    preference: int


_registry: dict[str, _Entry] = {}


def register_communication(
    name: str, *, preference: int = 0
) -> Callable[[type[_Communication]], type[_Communication]]:
    """Return a class decorator that registers a backend, also a third party's.

    The class derives from MoEEpCommunication and has a `config_type` whose `backend_name` is
    `name`.
    preference: "auto" takes the supported backend with the highest; equal ones in order of
        registration.
    Raises MoEEpConfigError where the name is taken by another class or does not fit the config,
    TypeError for anything but such a class.
    """

    def register(cls: type[_Communication]) -> type[_Communication]:
        if not (isinstance(cls, type) and issubclass(cls, MoEEpCommunication)):
            raise TypeError(
                f"what is registered must be a subclass of MoEEpCommunication, got {cls!r}."
            )
        if name == AUTO:
            raise MoEEpConfigError(f"name must not be {AUTO!r}, which asks for a choice.")
        if cls.config_type.backend_name != name:
            raise MoEEpConfigError(
                f"{cls.config_type.__name__}.backend_name must be {name!r}, the registered name, "
                f"got {cls.config_type.backend_name!r}."
            )
        taken = _registry.get(name)
        if taken is not None and taken.communication is not cls:
            raise MoEEpConfigError(f"name {name!r} is taken by {taken.communication.__name__}.")
        cls.backend_name = name
        _registry[name] = _Entry(cls, preference)
        return cls

    return register


def available_communication_backends() -> tuple[str, ...]:
    """Return the registered names, in the order in which "auto" considers them.

    Says nothing about what this machine supports.
    """
    return tuple(sorted(_registry, key=lambda name: -_registry[name].preference))


def communication_backend_name(backend: object) -> str:
    """Return the registered name of a backend given as name, config, config class, communication or
    its class.

    Raises KeyError listing the names where it is none of the registered ones, TypeError where it
    has no name at all.
    """
    name = backend if isinstance(backend, str) else getattr(backend, "backend_name", None)
    if not isinstance(name, str):
        raise TypeError(
            f"backend must be a name or have a backend_name, got {type(backend).__name__}."
        )
    if name not in _registry:
        known = ", ".join(available_communication_backends())
        raise KeyError(f"unknown backend {name!r}; registered are: {known}")
    return name


def is_communication_backend(backend: object) -> bool:
    """Return whether `communication_backend_name` would find it. Never raises."""
    try:
        communication_backend_name(backend)
    except Exception:
        return False
    return True


def create_communication(
    bootstrap: BootstrapConfig,
    params: MoEEpCommParams,
    backend: str | CommunicationConfig,
    **options: Any,
) -> MoEEpCommunication:
    """Create a communication over the group. Collective.

    backend: a registered name; a config object; or "auto": the group takes the most preferred
        backend that all ranks support and whose config knows every option.
    options: settings of the backend's config, as its constructor takes them; none with a config
        object.

    Raises KeyError listing the names for an unknown one, TypeError for a wrong type or an unknown
    option (with "auto": options that no backend has together), MoEEpConfigError for a wrong value
    or where the ranks disagree, MoEEpPlatformError where it cannot run; on all ranks together, with
    every rank's reason. A wrong `bootstrap` raises on its own rank alone, which cannot tell the
    others.
    """
    check_type("bootstrap", bootstrap, BootstrapConfig)
    if backend == AUTO:
        backend = _choose(bootstrap, options)
    try:
        cls, config = _resolve(backend, options)
    except Exception as failure:
        try:
            comm = _comm(bootstrap, {**getattr(backend, "__dict__", {}), **options})
        except Exception:  # nobody to tell
            raise failure from None
        refuse_construction(comm, failure)
    return cls(bootstrap, params, config)


def estimate_workspace_bytes(
    params: MoEEpCommParams,
    ep_size: int,
    config: CommunicationConfig,
    *,
    device: int | str | torch.device | None = None,
) -> int:
    """Return the exact bytes per rank that a communication will hold, before any allocation.

    device: as in BootstrapConfig.

    Not collective. Raises KeyError for a config of a backend that is not registered, TypeError and
    MoEEpConfigError for a wrong argument.
    """
    check_type("params", params, MoEEpCommParams)
    check_type("config", config, CommunicationConfig)
    require_int_in_range("ep_size", ep_size, 1, MAX_EP_SIZE)
    entry = _registry[communication_backend_name(config)]
    return entry.communication.estimate_workspace_bytes(params, ep_size, config, device=device)


def _resolve(
    backend: str | CommunicationConfig, options: dict[str, Any]
) -> tuple[type[MoEEpCommunication], CommunicationConfig]:
    """Return the class to construct and the config to construct it with."""
    cls = _registry[communication_backend_name(backend)].communication
    if isinstance(backend, str):
        if _unknown_options(cls.config_type, options):
            raise TypeError(_lacks_options(cls.config_type, options))
        return cls, cls.config_type(**options)
    if options:
        raise TypeError(
            f"options must not be given with a {type(backend).__name__}, got {', '.join(options)}: "
            "set them there."
        )
    check_type("backend", backend, cls.config_type)
    return cls, backend


def _comm(bootstrap: BootstrapConfig, settings: Mapping[str, Any]) -> CommBackend:
    """Return what this rank can agree over, whatever is wrong with its settings. A wrong one counts
    as not given: the other ranks must hear of it."""
    usable = {}
    for name in _COMM_SETTINGS & settings.keys():
        with contextlib.suppress(TypeError, MoEEpConfigError):
            usable[name] = getattr(CommunicationConfig(**{name: settings[name]}), name)
    return bootstrap.comm(**usable)


@dataclass(frozen=True)
class _Candidates:
    """What one rank could run: each registered backend, and why not."""

    reasons_against: dict[str, str | None]
    host: HostIdentity


def _choose(bootstrap: BootstrapConfig, options: dict[str, Any]) -> str:
    """Return the name that the group agrees on. Collective."""

    def own_candidates() -> _Candidates:
        _require_a_backend_with(options)
        CommunicationConfig(**{name: options[name] for name in _COMM_SETTINGS & options.keys()})
        return _Candidates(
            {
                name: _reason_against(entry.communication, bootstrap.torch_device, options)
                for name, entry in _registry.items()
            },
            HostIdentity.of_this_process(),
        )

    of_ranks = agree(_comm(bootstrap, options), attempt(own_candidates), what="choosing a backend")
    hosts = [candidates.host for candidates in of_ranks]
    table = []
    for name in available_communication_backends():
        if any(name not in candidates.reasons_against for candidates in of_ranks):
            continue  # a backend that only some ranks have registered is none of the group's
        reasons = unsupported_reasons(
            _registry[name].communication,
            [candidates.reasons_against[name] for candidates in of_ranks],
            hosts,
        )
        if reasons is None:
            return name
        table.append(f"{name}: {reasons}")
    raise MoEEpPlatformError(f"no backend can run on this group. {'. '.join(table)}.")


def _require_a_backend_with(options: dict[str, Any]) -> None:
    """Raise TypeError if no backend has all the options, whatever this machine supports."""
    configs = [
        _registry[name].communication.config_type for name in available_communication_backends()
    ]
    if options and all(_unknown_options(config, options) for config in configs):
        raise TypeError(" ".join(_lacks_options(config, options) for config in configs))


def _reason_against(
    cls: type[MoEEpCommunication], device: torch.device, options: dict[str, Any]
) -> str | None:
    unknown = _unknown_options(cls.config_type, options)
    if unknown:
        return f"it has no option {', '.join(unknown)}"
    return own_reason_against(cls, device)


def _unknown_options(config_type: type[CommunicationConfig], options: dict[str, Any]) -> list[str]:
    known = _option_names(config_type)
    return [name for name in options if name not in known]


def _lacks_options(config_type: type[CommunicationConfig], options: dict[str, Any]) -> str:
    """Return the sentence on the options that a backend does not have."""
    return (
        f"backend {config_type.backend_name!r} has no option "
        f"{', '.join(_unknown_options(config_type, options))}; "
        f"it has: {', '.join(_option_names(config_type))}."
    )


def _option_names(config_type: type[CommunicationConfig]) -> list[str]:
    return [f.name for f in dataclasses.fields(config_type) if f.init]
