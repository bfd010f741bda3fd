"""Which exceptions does the library raise, and what does each say about the object that raised it?

Arguments of the wrong type or dtype raise the built-in `TypeError`, as in torch.
"""

from __future__ import annotations

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
    """The ranks called dispatch with different active_rank_mask, or a rank was masked off while it
    was in combine.

    Raised on every rank that counts on one whose mask is another; ranks that agree with all whom
    they count on go on. Nothing was delivered, and the object is broken: `reinitialize` mends it.
    On CUDA by the next call or `check`; of a rank that was in combine, whose sums must not be used
    then, by `check`, or after it has called dispatch without the rank that masked it off.
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


# Ops know no Python types: what they throw is a message that starts with one of these names and
# ": ". csrc/bindings/errors.cpp has it raised as what `error_of_op` makes of it, through C++ and
# whatever calls the op, a compiled graph too.
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
_OF_OP = "_moe_ep_op"


def error_of_op(thrown: str) -> BaseException | None:
    """Return the error that an op's message stands for, or None if it stands for none.

    "MoEEpTimeoutError: rank 0 waited ..." is that class, with the message that follows its name. A
    wait that a signal handler ended (Ctrl-C) stands for what the handler raised.
    """
    name, found, message = thrown.partition(": ")
    if found and name == _INTERRUPTED:
        return _native.take_interrupt()
    cls = _RAISED_BY_OPS.get(name)
    if cls is None or not found:
        return None
    error = cls(message)
    error.__dict__[_OF_OP] = True
    return error


def is_of_library(error: BaseException) -> bool:
    """Return whether an error is the library's, a TypeError of an op included."""
    return isinstance(error, MoEEpError) or _OF_OP in error.__dict__


_native.set_error_maker(error_of_op)
