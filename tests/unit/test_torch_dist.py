"""Is torch_dist right where tensors overlap or ranks disagree? What needs no second process."""

from dataclasses import replace

import pytest
import torch

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpDisagreementError,
    MoEEpInputError,
    TorchDistAlltoAll,
)
from moe_ep.torch_dist.header import RoundHeader, require_agreement

PARAMS = MoEEpCommParams(4, 2, 8, 16)
X = torch.arange(3 * 16).view(3, 16).bfloat16()
IDS = torch.tensor([[0, 1]] * 3)
HEADER = RoundHeader(
    epoch=1,
    num_tokens=3,
    tokens_per_rank=8,
    row_bytes=32,
    scale_bytes=0,
    has_weights=1,
    has_stats=1,
)


@pytest.fixture
def comm():
    return TorchDistAlltoAll(BootstrapConfig(1, 0, device="cpu"), PARAMS)


@pytest.mark.parametrize("first_row", [0, 1, 5])
def test_the_output_may_be_a_part_of_the_expert_output(comm, first_row):
    expert_output = torch.zeros(8, 16, dtype=torch.bfloat16)
    expert_output[:3] = comm.dispatch(X, IDS).hidden_states[:3]
    output = expert_output[first_row : first_row + 3]
    assert comm.combine(expert_output, output=output) is output
    assert torch.equal(output, X)


def test_an_output_of_any_strides_is_written_before_a_wrong_id_is_raised(comm):
    output = torch.full((16, 6), 7.0).bfloat16().t()[::2]
    result = comm.dispatch(X, torch.tensor([[0, 1], [4, 1], [-7, 99]]))
    with pytest.raises(MoEEpInputError, match="token 1, slot 0: 4"):
        comm.combine(result.hidden_states, output=output)
    assert torch.equal(output, torch.stack([X[0], X[1], torch.zeros_like(X[2])]))


@pytest.mark.parametrize(
    ("field", "name"), [("has_weights", "topk_weights"), ("has_stats", "eplb_local_stats")]
)
def test_what_only_some_ranks_give_is_a_disagreement(field, name):
    require_agreement([HEADER, replace(HEADER, num_tokens=0)])
    with pytest.raises(MoEEpDisagreementError, match=f"{name} given: rank 0: yes; rank 1: no"):
        require_agreement([HEADER, replace(HEADER, **{field: 0})])
