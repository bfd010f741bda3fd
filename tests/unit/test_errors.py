"""Is every error of the classes that the contract names, and do op errors come out typed?"""

import pytest

import moe_ep
from moe_ep.errors import MoEEpDisagreementError, raise_typed_errors, translate_op_error

TYPED = [
    moe_ep.MoEEpConfigError,
    moe_ep.MoEEpPlatformError,
    moe_ep.MoEEpStateError,
    moe_ep.MoEEpTimeoutError,
    moe_ep.MoEEpInputError,
]


def test_config_errors_are_value_errors_and_the_others_runtime_errors():
    assert issubclass(moe_ep.MoEEpConfigError, ValueError)
    assert issubclass(MoEEpDisagreementError, moe_ep.MoEEpConfigError)
    assert all(issubclass(cls, RuntimeError) for cls in TYPED[1:])
    assert all(issubclass(cls, moe_ep.MoEEpError) for cls in TYPED)


@pytest.mark.parametrize("cls", [*TYPED, MoEEpDisagreementError, moe_ep.MoEEpMaskDisagreementError])
def test_an_op_s_message_becomes_the_typed_error_it_names(cls):
    error = translate_op_error(RuntimeError(f"{cls.__name__}: rank 0: waited 2.0 s"))
    assert type(error) is cls
    assert str(error) == "rank 0: waited 2.0 s"


def test_the_c_plus_plus_stack_is_dropped():
    message = "MoEEpStateError: no\nException raised from dispatch at cake.cpp:1\n#0 ..."
    assert str(translate_op_error(RuntimeError(message))) == "no"


@pytest.mark.parametrize("message", ["", "out of memory", "MoEEpStateError", "KeyError: x"])
def test_other_errors_are_not_translated(message):
    assert translate_op_error(RuntimeError(message)) is None


def test_raise_typed_errors_hides_the_op_s_error_behind_the_typed_one():
    with pytest.raises(moe_ep.MoEEpInputError, match="id 4") as raised, raise_typed_errors():
        raise RuntimeError("MoEEpInputError: id 4")
    assert raised.value.__suppress_context__


def test_raise_typed_errors_passes_other_errors():
    with pytest.raises(RuntimeError, match="out of memory"), raise_typed_errors():
        raise RuntimeError("out of memory")
