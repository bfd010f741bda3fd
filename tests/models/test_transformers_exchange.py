"""Do experts of transformers get the same rows, and give the same sums, on each way to them?"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    TorchDistAlltoAll,
    create_communication,
    pick_groups,
    pick_sums,
)
from tests.rounds.layers import random_inputs, small_integers

pytest.importorskip("transformers", "5.17")

from moe_ep.integrations.transformers import exchange

PARAMS = MoEEpCommParams(4, 2, 8, 16, dtype=torch.float32)


def outcome(tokens: int, *, asks_host: bool) -> list[Tensor]:
    """The sums, and the gradients of tokens, weights and experts."""
    x, ids, weights = random_inputs(PARAMS, tokens, small_integers, 3)
    matrices = small_integers((4, 16, 16), 4).requires_grad_()

    def experts(rows: Tensor, local_ids: Tensor, ones: Tensor) -> Tensor:
        assert local_ids.shape == ones.shape == (len(rows), 1)
        assert (ones == 1).all()
        given = local_ids[:, 0]
        assert not asks_host or (given < 4).all()  # such experts may not skip rows
        made = torch.einsum("nh,nhj->nj", rows, matrices[given.clamp(max=3)])
        return torch.where(local_ids < 4, made, 0)

    with TorchDistAlltoAll(BootstrapConfig(1, 0, device="cpu"), PARAMS) as communication:
        x.requires_grad_()
        weights.requires_grad_()
        one = exchange.dispatch(communication, x, ids, weights, None)
        partial = exchange.run_experts(one, experts, asks_host=asks_host)
        output = exchange.combine(one, partial)
        output.backward(small_integers(output.shape, 5))
    got = [output.detach(), x.grad, weights.grad, matrices.grad]
    assert all(value is not None for value in got)
    return got  # type: ignore[return-value]


@pytest.mark.parametrize("tokens", [0, 1, 8])
@pytest.mark.parametrize("asks_host", [False, True])
def test_rows_that_are_skipped_and_rows_that_are_left_out_give_the_same(
    monkeypatch: pytest.MonkeyPatch, tokens: int, asks_host: bool
) -> None:
    left_out = outcome(tokens, asks_host=False)
    for module in (exchange, pick_groups, pick_sums):  # as on a device
        monkeypatch.setattr(module, "host_may_read", lambda tensor: False)
    for got, wanted in zip(outcome(tokens, asks_host=asks_host), left_out, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("backend", ["cake", "torch_dist"])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_what_experts_make_in_another_dtype_is_rounded_to_the_tokens(
    backend: str, has_gradients: bool
) -> None:
    params = MoEEpCommParams(4, 2, 8, 16, dtype=torch.bfloat16)
    x, ids, weights = random_inputs(params, 5, small_integers, 3)

    def outcome_of(dtype: torch.dtype) -> list[Tensor]:
        tokens = x.clone().requires_grad_(has_gradients)

        def experts(rows: Tensor, local_ids: Tensor, ones: Tensor) -> Tensor:
            return (rows.float() * 1.1).bfloat16().to(dtype)  # as under autocast

        one = exchange.dispatch(of, tokens, ids, weights, None)
        sums = exchange.combine(one, exchange.run_experts(one, experts, asks_host=True))
        if not has_gradients:
            return [sums]
        return [sums, *torch.autograd.grad(sums.sum(), tokens)]

    bootstrap = BootstrapConfig(1, 0, device="cpu")
    with (
        torch.set_grad_enabled(has_gradients),
        create_communication(bootstrap, params, backend) as of,
    ):
        wanted = outcome_of(torch.bfloat16)
        for dtype in (torch.float32, torch.float64):
            for got, want in zip(outcome_of(dtype), wanted, strict=True):
                assert torch.equal(got, want)
