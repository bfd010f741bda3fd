"""Is every error of the classes that the contract names, and do ops raise them?"""

import pytest
import torch

import moe_ep
from moe_ep.errors import MoEEpDisagreementError, error_of_op, is_of_library

TYPED = [
    moe_ep.MoEEpConfigError,
    moe_ep.MoEEpAbandonedError,
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


@pytest.mark.parametrize(
    "cls", [*TYPED, MoEEpDisagreementError, moe_ep.MoEEpMaskDisagreementError, TypeError]
)
def test_an_op_s_message_becomes_the_error_it_names(cls):
    error = error_of_op(f"{cls.__name__}: rank 0: waited 2.0 s")
    assert type(error) is cls
    assert str(error) == "rank 0: waited 2.0 s"
    assert is_of_library(error)
    assert is_of_library(cls("no")) == (cls is not TypeError)


@pytest.mark.parametrize("message", ["", "out of memory", "MoEEpStateError", "KeyError: x"])
def test_other_messages_stand_for_no_error(message):
    assert error_of_op(message) is None


def test_ops_raise_the_errors_themselves():
    memory = torch.zeros(1, 64, dtype=torch.uint8)
    with pytest.raises(moe_ep.MoEEpConfigError, match=r"^geometry must have 12 fields, got 0$"):
        torch.ops.moe_ep.cake_check(memory, [], 0)
    with pytest.raises(TypeError, match="recv_token_counts must be int32"):
        torch.ops.moe_ep.sanitize_expert_ids(
            torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1), -1
        )
