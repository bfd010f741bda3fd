"""Which exceptions does the library raise, and what does each say about the object that raised it?

Arguments of the wrong type or dtype raise the built-in `TypeError`, as in torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_ep import _native


class MoEEpError(Exception):
    """Base of every error of this library."""


class MoEEpConfigError(MoEEpError, ValueError):
    """A value, shape or setting is wrong, or the ranks of the group disagree about one."""


class MoEEpDisagreementError(MoEEpConfigError):
    """The ranks called dispatch or combine with different arguments. Raised on all of them.

    Nothing was delivered, and the object goes on (but see the subclass). On CUDA it is recorded by
    the device: `check` raises it, else a `combine`, after which the round is over as always.
    """


class MoEEpMaskDisagreementError(MoEEpDisagreementError):
    """The ranks called dispatch with different active_rank_mask, on the CPU.

    Raised on every rank that counts on one whose mask is another; ranks that agree with all whom
    they count on go on. Nothing was delivered, and the object is broken: `reinitialize` mends it.
    """


class MoEEpAbandonedError(MoEEpError, RuntimeError):
    """Experts raised on some ranks, between dispatch and combine. Raised by combine on the others.

    No sums were formed, the round is over on all ranks, and the object goes on.
    """


class MoEEpPlatformError(MoEEpError, RuntimeError):
    """The backend cannot run here. Names each rank's reason and is raised on all ranks together."""


class MoEEpStateError(MoEEpError, RuntimeError):
    """The call does not fit the object's state.

    Combine before dispatch, dispatch twice or in the round of an object that shares the workspace,
    use while the memory is released, after destroy or after a failure.
    """


class MoEEpTimeoutError(MoEEpError, RuntimeError):
    """A peer did not answer in `timeout_sec`, its process has ended, or its connection broke. The
    object is broken."""


class MoEEpInputError(MoEEpError, RuntimeError):
    """Values inside a tensor were wrong: expert ids outside `[0, num_experts)`, now skipped."""


# Ops know no Python types: they raise RuntimeError whose message starts with one of these names
# and ": ".
_RAISED_BY_OPS: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        TypeError,
        MoEEpConfigError,
        MoEEpDisagreementError,
        MoEEpMaskDisagreementError,
        MoEEpAbandonedError,
        MoEEpPlatformError,
        MoEEpStateError,
        MoEEpTimeoutError,
        MoEEpInputError,
    )
}
_INTERRUPTED = "Interrupted"


def translate_op_error(exc: BaseException) -> BaseException | None:
    """Return the error that an op's exception stands for, or None if it stands for none.

    An op's message is "MoEEpTimeoutError: rank 0 waited ..."; the returned error's message is what
    follows the name, without the C++ stack that torch may append. A wait that a signal handler
    ended (Ctrl-C) stands for what the handler raised.
    """
    name, found, message = str(exc).partition(": ")
    if found and name == _INTERRUPTED:
        return _native.take_interrupt()
    cls = _RAISED_BY_OPS.get(name)
    if cls is None or not found:
        return None
    return cls(message.partition("\nException raised from ")[0])


def stands_for(cls: type[Exception], exc: BaseException) -> bool:
    """Return whether an op's exception stands for an error of this class."""
    return str(exc).startswith(f"{cls.__name__}: ")


@contextmanager
def raise_typed_errors() -> Iterator[None]:
    """Raise the typed error in place of an op's RuntimeError that stands for one."""
    try:
        yield
    except RuntimeError as exc:
        error = translate_op_error(exc)
        if error is None:
            raise
        try:
            raise error from None
        finally:
            del error  # its frames would hold it, and their callers', until a garbage collection
