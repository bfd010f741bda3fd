"""Are tensors that are more than their values refused, before anything is sent?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpStateError,
    available_communication_backends,
    create_communication,
)

ROWS = torch.arange(32.0).view(2, 16)
IDS = torch.tensor([[0, 1], [1, 0]])
WEIGHTS = torch.tensor([[0.5, 0.25], [1.0, 2.0]])


@pytest.fixture(params=available_communication_backends())
def comm(request: pytest.FixtureRequest) -> Iterator[MoEEpCommunication]:
    """A communication of one rank, which must work after every refusal."""
    params = MoEEpCommParams(4, 2, 4, 16, dtype=torch.float32)
    alone = BootstrapConfig(1, 0, device="cpu")
    with create_communication(alone, params, request.param) as made:
        yield made
        assert torch.equal(play(made), ROWS)


def play(comm: MoEEpCommunication, rows: Tensor = ROWS, ids: Tensor = IDS) -> Tensor:
    return comm.combine(comm.dispatch(rows, ids, WEIGHTS).hidden_states)


@pytest.fixture
def distributed(comm: MoEEpCommunication) -> Iterator[Callable[[Tensor], Tensor]]:
    """Make a DTensor of a tensor."""
    if dist.is_initialized():
        pytest.skip("this process is part of a distributed run")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda tensor: distribute_tensor(tensor, mesh, [Replicate()])
    dist.destroy_process_group()


def test_distributed_tensors(
    comm: MoEEpCommunication, distributed: Callable[[Tensor], Tensor]
) -> None:
    with torch.no_grad():
        with pytest.raises(TypeError, match=r"hidden_states must be a plain.*DTensor.*to_local"):
            play(comm, distributed(ROWS))
        with pytest.raises(TypeError, match=r"topk_ids must be a plain.*DTensor.*to_local"):
            play(comm, ROWS, distributed(IDS))
        received = comm.dispatch(ROWS, IDS)
        with pytest.raises(TypeError, match=r"expert_output must be a plain.*DTensor.*to_local"):
            comm.combine(distributed(received.hidden_states))
        comm.combine(received.hidden_states)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacfwd])
def test_tensors_of_a_transform(
    comm: MoEEpCommunication, transform: Callable[..., Callable[[Tensor], Tensor]]
) -> None:
    with pytest.raises(TypeError, match="hidden_states must be a plain tensor, got one of a torch"):
        transform(lambda rows: play(comm, rows).sum())(ROWS)


def test_tensors_with_a_tangent(comm: MoEEpCommunication) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(ROWS, torch.ones_like(ROWS))
        with pytest.raises(TypeError, match=r"hidden_states must be a plain.*forward-mode"):
            play(comm, dual)
        assert torch.equal(play(comm), ROWS)  # others are legal there


def test_gradients_in_a_batch(comm: MoEEpCommunication) -> None:
    rows = ROWS.clone().requires_grad_()
    output = play(comm, rows)
    batch = torch.stack([torch.ones_like(ROWS), 2 * torch.ones_like(ROWS)])
    with pytest.raises(MoEEpStateError, match="gradients in a batch"):
        torch.autograd.grad(output, rows, batch, is_grads_batched=True, retain_graph=True)
    (grad,) = torch.autograd.grad(output, rows, batch[1])
    assert torch.equal(grad, batch[1])
