"""Are gradients through dispatch and combine exact, and does backward stay in step on all ranks?"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpConfigError,
    MoEEpStateError,
    MoEEpTimeoutError,
    create_communication,
)
from tests.backends import ALL, Backend, every_backend, naming_silent_peers, on_each, on_the_cpu
from tests.bits import assert_same_bits
from tests.conftest import RunOnRanks
from tests.gpu_cases import few_on_gpus
from tests.problems import Problem, expect, problem_of
from tests.ranks import RankContext
from tests.ranks.waiting import introduce, outlive
from tests.rounds import create
from tests.rounds.gradients import (
    OwnExchange,
    ReferenceExchange,
    Trained,
    Training,
    random_training,
    run_model,
)

pytestmark = pytest.mark.multirank
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@torch.enable_grad()
def train(context: RankContext, backend: str, trainings: Sequence[Training]) -> list[Any]:
    """Body: train each model on one communication for each, twice in turn on the same one."""
    results: list[Any] = []
    for one in trainings:
        with create(context, one.params, backend, **one.options) as communication:
            if one.active_ranks is not None and context.rank not in one.active_ranks:
                results.append(None)
                continue
            run_model(one, OwnExchange(one, communication))
            results.append(run_model(one, OwnExchange(one, communication))[0])
    return results


def check_training(
    ranks: RunOnRanks, backend: Backend, device: str, trainings: Sequence[Training]
) -> list[list[Trained]]:
    """Train on ranks, and compare every output and gradient with the oracle's, bit for bit. Returns
    the oracle's, for each training by rank.
    """
    size = trainings[0].ep_size
    assert {one.ep_size for one in trainings} == {size}
    body = {"backend": backend.name, "trainings": trainings}
    of_ranks = ranks(size, train, device=device, **body)
    all_wanted = []
    for index, one in enumerate(trainings):
        wanted = run_model(one, ReferenceExchange(one))
        all_wanted.append(wanted)
        for rank in range(size) if one.active_ranks is None else one.active_ranks:
            got, want, what = of_ranks[rank][index], wanted[rank], f"training {index}:"
            assert_same_bits(got.output, want.output, rank=rank, what=f"{what} output")
            _compare(got.x, want.x, rank, f"{what} gradient of hidden_states")
            _compare(got.w, want.w, rank, f"{what} gradient of topk_weights")
            for layer, (ours, theirs) in enumerate(zip(got.gates, want.gates, strict=True)):
                _compare(ours, theirs, rank, f"{what} gradient of the experts of layer {layer}")
    return all_wanted


def _of(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad


def _compare(got: Tensor | None, want: Tensor | None, rank: int, what: str) -> None:
    """None is zero: which of the two it is depends on what the other ranks' losses reach."""
    if got is None or want is None:
        for other in (got, want):
            assert other is None or not other.any(), f"{what} on rank {rank}: {got}, not {want}"
        return
    assert_same_bits(got, want, rank=rank, what=what)


# n differs per rank, one rank has no token, and hidden sizes are odd.
TOKENS = {2: [7, 0], 3: [3, 5, 0], 4: [0, 7, 1, 4]}
SIZES = pytest.mark.parametrize("size", TOKENS)
SMALL = MoEEpCommParams(6, 3, 7, 5, FP32)


@every_backend
@few_on_gpus(size=[2])
@SIZES
def test_gradients_equal_the_oracles(
    ranks: RunOnRanks, backend: Backend, device: str, size: int
) -> None:
    tokens = TOKENS[size]
    trainings = [
        random_training(MoEEpCommParams(10, 4, 7, 33, BF16), tokens, 1),
        random_training(MoEEpCommParams(5, 2, 9, 72, FP16), tokens[::-1], 2, layers=2),
        random_training(MoEEpCommParams(4, 4, 7, 7, FP32, None, 9), tokens, 3, layers=3),
        # Rows of 6 bytes: each column of the weights' gradient needs a round.
        random_training(MoEEpCommParams(3, 3, 8, 3, BF16), [n + 1 for n in tokens], 4, layers=2),
        # Ranks without an expert.
        random_training(MoEEpCommParams(1, 1, 7, 16, BF16), tokens, 5),
        random_training(SMALL, tokens, 6, layers=2, tokens_per_rank=7),
        random_training(replace(SMALL, max_tokens_per_rank=20), tokens, 7, tokens_per_rank=8),
        random_training(replace(SMALL, dispatch_format=None), [0] * size, 8, layers=2),
        random_training(SMALL, [0] * size, 9, tokens_per_rank=0, skips=False),
    ]
    wanted = check_training(ranks, backend, device, trainings)
    for of_ranks in wanted[:-2]:
        assert any(bool(one.x.any()) for one in of_ranks if one.x is not None)
        assert any(bool(one.w.any()) for one in of_ranks if one.w is not None)


@every_backend
@few_on_gpus(size=[2])
@SIZES
def test_every_way_to_come_to_a_backward(
    ranks: RunOnRanks, backend: Backend, device: str, size: int
) -> None:
    of = functools.partial(random_training, replace(SMALL, dtype=BF16), TOKENS[size])
    trainings = [
        of(10, grads=("x",)),
        of(11, grads=("w",), layers=2),
        of(12, grads=("x", "w"), layers=2),
        of(13, grads=("gates",), skips=False),
        of(14, grads=("gates",), skips=False, layers=2),
        of(15, losses=("sum",)),
        of(16, losses=("transposed", "sum")),
        # Some ranks' losses leave combine or everything out.
        of(17, losses=("nothing", "weighted"), layers=2),
        of(18, losses=("rows",), layers=2),
        of(19, losses=("rows", "nothing")),
        of(20, backwards=2, layers=2),
        of(21, backwards=3, retain=True, layers=2),
        of(23, backwards=3, interleaved=True, layers=2),
        of(22, backwards=2, grads=("gates",), skips=False, retain=True, layers=2),
    ]
    check_training(ranks, backend, device, trainings)


@every_backend
@few_on_gpus(size=[2])
@pytest.mark.parametrize("size", [2, 3])
def test_activation_checkpointing_replays_rounds_in_step(
    ranks: RunOnRanks, backend: Backend, device: str, size: int
) -> None:
    of = functools.partial(random_training, replace(SMALL, dtype=BF16), TOKENS[size])
    trainings = [
        of(30, checkpointed=False, layers=3),
        of(31, checkpointed=True, layers=3),
        of(32, checkpointed=False, grads=("gates",), skips=False, layers=2),
        of(33, checkpointed=False, grads=("w",), backwards=2, layers=2),
    ]
    check_training(ranks, backend, device, trainings)


@on_each(having="masks")
def test_the_mask_of_the_forward_holds_in_the_backward(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    how = {"options": {"enable_rank_mask": True}, "layers": 2}
    trainings = [
        random_training(SMALL, [3, 5, 0, 7], 40, active_ranks=(0, 2, 3), **how),
        random_training(SMALL, [3, 5, 2, 7], 41, active_ranks=(1, 3), **how),
        random_training(SMALL, [3, 5, 2, 7], 42, active_ranks=(0, 1, 2, 3), **how),
    ]
    check_training(ranks, backend, device, trainings)


def test_the_oracle_gives_the_gradients_of_the_dense_layer() -> None:
    """Small integers: every order of the sums is exact."""
    params = MoEEpCommParams(6, 3, 7, 5, FP32)
    one = random_training(params, [3, 5, 0], 50, losses=("sum",))
    xs = [x.mul(4).round() for x in one.hidden_states]
    ws = [w.mul(4).round() for w in one.topk_weights]
    wanted = run_model(replace(one, hidden_states=xs, topk_weights=ws), ReferenceExchange(one))
    for rank, (x, w, ids) in enumerate(zip(xs, ws, one.topk_ids[0], strict=True)):
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        gate = 1 + torch.arange(5) % 3 * 0.375
        factor = torch.where(ids >= 0, w * (ids + 0.5), 0.0).sum(1, keepdim=True)
        (x + x * gate * factor).sum().backward()
        assert torch.equal(_of(wanted[rank].x), _of(x.grad))
        assert torch.equal(_of(wanted[rank].w), _of(w.grad))


# ---------------------------------------------------------------- ranks that leave something out


@torch.enable_grad()
def want_different_gradients(context: RankContext, backend: str) -> list[Tensor]:
    """Body: rank 0 asks for the gradient of its tokens, the others only for their experts'; the
    next round closes what they left open.
    """
    one = random_training(SMALL, [3, 5, 2], 60)
    with create(context, SMALL, backend) as communication:

        def forward() -> tuple[Tensor, Tensor, Tensor]:
            x = one.hidden_states[context.rank].to(communication.device).requires_grad_()
            gate = torch.ones(5, device=communication.device, requires_grad=True)
            ids = one.topk_ids[0][context.rank].to(communication.device)
            received = communication.dispatch(x, ids)
            return x, gate, communication.combine(received.hidden_states * gate)

        x, gate, y = forward()
        (partly,) = torch.autograd.grad(y.sum(), [x if context.rank == 0 else gate])
        x, gate, y = forward()
        both = torch.autograd.grad(y.sum(), [x, gate])
        return [grad.cpu() for grad in (partly, *both)]


@every_backend
def test_a_backward_that_leaves_a_round_open_is_closed_by_the_next(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    results = ranks(3, want_different_gradients, device=device, backend=backend.name)
    one = random_training(SMALL, [3, 5, 2], 60)
    owners = torch.arange(6) // 2
    for rank, (partly, of_x, of_gate) in enumerate(results):
        ids = one.topk_ids[0][rank]
        goes = torch.stack([((ids >= 0) & (owners[ids.clamp(0)] == p)).any(1) for p in range(3)], 1)
        assert torch.equal(of_x, goes.sum(1, keepdim=True).float().expand(-1, 5))
        if rank == 0:  # what the other ranks should have added is missing
            assert torch.equal(partly.isnan(), goes[:, 1:].any(1, keepdim=True).expand(-1, 5))
        else:
            assert torch.equal(partly, of_gate)


@torch.enable_grad()
def train_two_objects(context: RankContext, backend: str) -> list[Tensor]:
    """Body: two layers, with an object each or one for both; a backward that leaves a round open
    on the one object, and goes on with the other. Returns the gradients of each way.
    """
    params = MoEEpCommParams(6, 2, 8, 16, torch.float32)
    g = torch.Generator().manual_seed(context.rank)
    ids = torch.randint(0, 6, (5, 2), generator=g).to(context.device)
    grads = []
    with create(context, params, backend) as one, create(context, params, backend) as other:
        for layers in ((one, one), (one, other)):
            x = torch.ones(5, 16, device=context.device, requires_grad=True)
            gates = [
                torch.full((), gate, device=x.device, requires_grad=True) for gate in (2.0, 3.0)
            ]
            y = x
            for layer, gate in zip(layers, gates, strict=True):
                y = layer.combine(layer.dispatch(y, ids).hidden_states * gate)
            grads += torch.autograd.grad(y.sum(), gates[1:], retain_graph=True)
            with torch.no_grad():
                layers[0].combine(layers[0].dispatch(x, ids).hidden_states)
            grads += torch.autograd.grad(y.sum(), [x, *gates])
    return [grad.cpu() for grad in grads]


@every_backend
def test_objects_that_share_a_workspace_go_back_in_turn(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    for grads in ranks(2, train_two_objects, device=device, backend=backend.name):
        half = len(grads) // 2
        for got, wanted in zip(grads[half:], grads[:half], strict=True):
            assert_same_bits(got, wanted, rank=0, what="gradient")


@torch.enable_grad()
def leave_combine_out(context: RankContext, backend: str) -> str:
    """Body: the loss of rank 0 has no output of combine in it."""
    said = ""
    with create(context, SMALL, backend) as communication:
        x = torch.ones(2, 5, device=communication.device, requires_grad=True)
        ids = torch.tensor([[0, 5, -1]] * 2, device=communication.device)
        for left_out in (True, False):
            received = communication.dispatch(x, ids).hidden_states
            y = communication.combine(received)
            loss = received.sum() if left_out and context.rank == 0 else y.sum()
            try:
                loss.backward()
            except MoEEpStateError as raised:
                said += str(raised)
        assert x.grad is not None
        return said + str(x.grad[0, 0].item())


@every_backend
def test_gradients_of_peers_that_would_be_lost_raise(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    first, *others = ranks(3, leave_combine_out, device=device, backend=backend.name)
    assert first.startswith("the loss of this rank depends on what dispatch returned, but not on")
    assert first.endswith("is enough.2.0")
    # Two backwards, two owners; in the first, owner 0 gives the gradient of its own loss.
    assert others == ["4.0"] * 2


@torch.enable_grad()
def leave_backward_out(context: RankContext, backend: str) -> str:
    """Body: rank 1 never calls backward, as long as the other one is there."""
    introduce(context)
    bootstrap = BootstrapConfig(context.size, context.rank, device=context.device)
    communication = create_communication(bootstrap, SMALL, backend, timeout_sec=4)
    x = torch.ones(2, 5, device=context.device, requires_grad=True)
    ids = torch.tensor([[0, 5, -1]] * 2, device=context.device)
    y = communication.combine(communication.dispatch(x, ids).hidden_states)
    said = ""
    if context.rank == 0:
        try:
            y.sum().backward()
            communication.check()
        except MoEEpTimeoutError as raised:
            said = str(raised)
        with pytest.raises(MoEEpStateError, match="broken communication"):
            communication.dispatch(x, ids)
    else:
        outlive(0)
    return said


@naming_silent_peers
def test_a_rank_without_backward_is_named_by_its_peers(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    of_each = [{"backend": one.name} for one in ALL]
    outcomes = ranks.waiting(2, leave_backward_out, of_each, device=device, backend=backend.name)
    said = outcomes[0].value
    assert "waited" in said
    assert "for rank 1" in said
    if device == "cpu":  # a GPU records it, and a later call raises it
        assert said.startswith("in the backward of combine: rank 0 waited"), said
        assert "Every rank must run backward through the same dispatch and combine calls" in said


@torch.enable_grad()
def want_gradients_of_other_things(context: RankContext, backend: str) -> list[float]:
    """Body: rows require grad on rank 1 only, weights on both."""
    with create(context, SMALL, backend) as communication:
        x = torch.ones(2, 5, requires_grad=context.rank == 1)
        weights = torch.ones(2, 3, requires_grad=True)
        ids = torch.tensor([[0, 5, -1]] * 2)
        y = communication.combine(communication.dispatch(x, ids, weights).hidden_states)
        y.sum().backward()
        assert weights.grad is not None
        assert not weights.grad.any()
        return [] if x.grad is None else x.grad[:, 0].tolist()


@on_the_cpu
def test_gradients_that_a_peer_has_not_computed_are_nan(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    body = {"backend": backend.name}
    none, missed = ranks(2, want_gradients_of_other_things, device=device, **body)
    assert none == []
    assert [value != value for value in missed] == [True, True]  # rank 0 has not computed its part


@torch.enable_grad()
def skip_a_backward(context: RankContext, backend: str, with_weights: bool) -> Problem | None:
    """Body: rank 0 leaves a backward out, and its next forward meets the other's backward."""
    with create(context, SMALL, backend) as communication:
        ids = torch.tensor([[0, 5, -1]] * 2)
        weights = torch.ones(2, 3) if with_weights else None

        def forward() -> Tensor:
            gate = torch.ones((), requires_grad=True)
            received = communication.dispatch(torch.ones(2, 5), ids, weights)
            return communication.combine(received.hidden_states * gate)

        y = forward()
        return problem_of(forward if context.rank == 0 else y.sum().backward)


@on_the_cpu  # on a GPU a later combine raises it
@pytest.mark.parametrize("with_weights", [True, False])
def test_a_forward_is_not_taken_for_a_backward(
    ranks: RunOnRanks, backend: Backend, device: str, with_weights: bool
) -> None:
    body = {"backend": backend.name, "with_weights": with_weights}
    for problem in ranks(2, skip_a_backward, device=device, **body):
        expect(problem, MoEEpConfigError, ["topk_weights"])


@torch.enable_grad()
def want_gradients_on_one_rank(context: RankContext, backend: str) -> list[str]:
    """Body: only rank 0's weights require grad. The other's next round meets its backward."""
    said = []
    with create(context, SMALL, backend) as communication:
        x = torch.ones(2, 5, device=communication.device, requires_grad=True)
        weights = torch.ones(2, 3, device=communication.device, requires_grad=context.rank == 0)
        ids = torch.tensor([[0, 5, -1]] * 2, device=communication.device)
        y = communication.combine(communication.dispatch(x, ids, weights).hidden_states)
        for call in (y.sum().backward, lambda: communication.dispatch(x, ids, weights)):
            try:
                call()
            except MoEEpConfigError as raised:
                said.append(str(raised))
                break
    return said


@on_the_cpu  # on a GPU a later combine raises it
def test_ranks_that_disagree_about_requires_grad_are_told(
    ranks: RunOnRanks, backend: Backend, device: str
) -> None:
    body = {"backend": backend.name}
    (first,), (second,) = ranks(2, want_gradients_on_one_rank, device=device, **body)
    assert first.startswith("in the backward of dispatch: the ranks")
    assert "requires_grad of each argument must be the same" in first
    assert "rank 0: 4; rank 1: 20" in second or "payload row bytes 20" in second
