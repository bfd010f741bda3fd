"""Is a compiled layer right in every pattern of use, with the workspace never cloned?

Without gradients, on backends that have ops of their own for that.

With two ranks an op raises when it is handed a clone of the workspace, so a round that ends is a
round without clones. Values are small integers in float32: whatever Inductor fuses, the result is
exact.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpDispatchResult,
    MoEEpStateError,
    create_communication,
)
from moe_ep.cake import kernels
from moe_ep.one_sided.communication import OneSidedAlltoAll
from tests.backends import ALL, one_sided_names
from tests.compile.graph_memory import WatchedGraphs
from tests.conftest import RunOnRanks
from tests.ranks import RankContext

HIDDEN, EXPERTS, TOP_K, CAPACITY = 16, 4, 2, 8
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def owns_a_pick(comm: MoEEpCommunication, result: MoEEpDispatchResult) -> Tensor:
    first, end = comm.first_local_expert, comm.first_local_expert + comm.num_local_experts
    return ((result.topk_ids >= first) & (result.topk_ids < end)).any(1, keepdim=True)


def elementwise(comm: MoEEpCommunication, result: MoEEpDispatchResult) -> Tensor:
    return torch.where(owns_a_pick(comm, result), result.hidden_states * 2 + 1, 0)


def matmul(comm: MoEEpCommunication, result: MoEEpDispatchResult) -> Tensor:
    weight = torch.eye(HIDDEN) * 2 + torch.ones(HIDDEN, HIDDEN).tril(-1).triu(-1)
    return torch.where(owns_a_pick(comm, result), (result.hidden_states @ weight) % 64, 0)


def chain(comm: MoEEpCommunication, experts: Callable[..., Tensor], layers: int) -> Layer:
    def model(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        for _ in range(layers):
            x = (x + comm.combine(experts(comm, comm.dispatch(x, ids, weights)))) % 64
        return x

    return model


def late(comm: MoEEpCommunication, keep: Callable[[MoEEpDispatchResult], Tensor]) -> Layer:
    """What the first dispatch brought is used after the second one."""

    def model(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        first = comm.dispatch(x, ids, weights)
        kept = keep(first)
        x = comm.combine(elementwise(comm, first)) % 64
        x = comm.combine(elementwise(comm, comm.dispatch(x + 1, ids, weights)))
        return x + kept

    return model


def valid_rows(result: MoEEpDispatchResult) -> Tensor:
    return torch.where((result.topk_ids >= 0).any(1, keepdim=True), result.hidden_states, 0)


PATTERNS: dict[str, Callable[[MoEEpCommunication], Layer]] = {
    "elementwise x1": lambda comm: chain(comm, elementwise, 1),
    "elementwise x4": lambda comm: chain(comm, elementwise, 4),
    "matmul x2": lambda comm: chain(comm, matmul, 2),
    "rows kept": lambda comm: late(comm, lambda r: (valid_rows(r) * 3)[:1]),
    "sum kept": lambda comm: late(comm, lambda r: valid_rows(r).sum()),
    "rows kept as other dtype": lambda comm: late(
        comm, lambda r: (valid_rows(r).view(torch.int32) >> 16).sum()
    ),
    "ids, weights, counts kept": lambda comm: late(
        comm,
        lambda r: r.topk_ids.sum() + r.recv_token_counts.sum() + (r.topk_ids >= 0).sum(),
    ),
}


def inputs(rank: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * rank + num_tokens)
    x = torch.randint(0, 64, (num_tokens, HIDDEN), generator=random).float()
    ids = torch.rand(num_tokens, EXPERTS, generator=random).topk(TOP_K).indices
    return x, ids, torch.rand(num_tokens, TOP_K, generator=random)


def compiled_equals_eager(
    context: RankContext, backend: str, pattern: str, tokens: list[int], **options: bool
) -> int:
    params = MoEEpCommParams(EXPERTS, TOP_K, CAPACITY, HIDDEN, dtype=torch.float32)
    torch._dynamo.reset()
    counters.clear()
    how = {"timeout_sec": 100, **options}
    with create_communication(context.bootstrap(), params, backend, **how) as comm:
        model = PATTERNS[pattern](comm)
        compiled = torch.compile(model, fullgraph=True)
        for num_tokens in tokens:
            arguments = inputs(context.rank, num_tokens)
            want = model(*arguments)
            got = compiled(*arguments)
            assert torch.equal(got, want), f"{pattern}, n={num_tokens}: {got} is not {want}"
    graphs: int = counters["stats"]["unique_graphs"]
    return graphs


BACKENDS = [backend.name for backend in ALL if backend.communication._has_graph_ops]
# Compiling is what takes the time. A backend whose ops have the schemas of cake's, and one that
# returns new tensors in any case, need less; one layer alone is compiled with dynamic counts below.
CASES = [
    *[("cake", pattern) for pattern in PATTERNS if pattern != "elementwise x1"],
    ("nvlink_one_sided", "matmul x2"),
    ("nvlink_one_sided", "rows kept"),
    ("nvlink_two_sided", "elementwise x4"),
    ("nvlink_two_sided", "ids, weights, counts kept"),
]


@pytest.mark.parametrize(("backend", "pattern"), CASES)
def test_compiled_layers_equal_eager_ones_in_one_graph(
    ranks: RunOnRanks, backend: str, pattern: str
) -> None:
    how = {"backend": backend, "pattern": pattern, "tokens": [5]}
    assert ranks(2, compiled_equals_eager, **how) == [1, 1]


@pytest.mark.parametrize("backend", ["cake", "nvlink_two_sided"])
def test_token_counts_are_dynamic_after_one_recompile(ranks: RunOnRanks, backend: str) -> None:
    """With masks, and for nvlink_one_sided: tests.compile.test_masks_and_statistics."""
    how = {"backend": backend, "pattern": "elementwise x1", "tokens": [5, 7, 3, 8]}
    assert ranks(2, compiled_equals_eager, **how) == [2, 2]


@one_sided_names
def test_a_layer_whose_rows_travel_in_low_precision_compiles(
    ranks: RunOnRanks, backend: str
) -> None:
    how = {"backend": backend, "pattern": "elementwise x1", "tokens": [5]}
    how["use_low_precision_combine"] = True
    assert ranks(2, compiled_equals_eager, **how) == [1, 1]


def a_clone_of_the_workspace(context: RankContext, backend: str) -> str:
    params = MoEEpCommParams(EXPERTS, TOP_K, CAPACITY, HIDDEN, dtype=torch.float32)
    with create_communication(context.bootstrap(), params, backend) as comm:
        x, ids, _ = inputs(context.rank, 4)
        assert isinstance(comm, OneSidedAlltoAll)
        what = (ids, None, [x], None, None, comm._geometry, comm.ep_rank, -1, CAPACITY, 20)
        try:
            comm._ops.dispatch(comm._workspace.clone(), *what)
        except MoEEpStateError as exc:
            return str(exc)
        return "accepted"


def compiled_without_inductor(context: RankContext, backend: str) -> str:
    """AOTAutograd clones what an op mutates; the clone must be readable, and be refused."""
    params = MoEEpCommParams(EXPERTS, TOP_K, CAPACITY, HIDDEN, dtype=torch.float32)
    torch._dynamo.reset()
    with create_communication(context.bootstrap(), params, backend, timeout_sec=100) as comm:
        model = chain(comm, elementwise, 1)
        graphs = WatchedGraphs([comm])
        try:
            torch.compile(model, fullgraph=True, backend=graphs.backend)(*inputs(context.rank, 4))
        except MoEEpStateError as exc:
            assert graphs.parts > 0  # it was seen to be in the graph
            return str(exc)
        return "accepted"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiler_that_clones_the_workspace_gets_an_error(
    ranks: RunOnRanks, backend: str
) -> None:
    for said in ranks(2, compiled_without_inductor, backend=backend):
        assert "this workspace tensor is a copy of the shared one" in said, said


@one_sided_names
def test_a_clone_of_the_workspace_raises_and_names_the_pattern(
    ranks: RunOnRanks, backend: str
) -> None:
    for said in ranks(2, a_clone_of_the_workspace, backend=backend):
        assert "this workspace tensor is a copy of the shared one" in said, said


def test_views_of_the_workspace_cannot_be_compiled() -> None:
    def model(workspace: Tensor) -> Tensor:
        return kernels.wrap_workspace(workspace, (2,), 0, 16, torch.float32) * 2

    workspace = torch.zeros(64, dtype=torch.uint8)
    assert torch.equal(model(workspace), torch.zeros(2, 2))
    with pytest.raises(Exception, match="views of the workspace are for eager code"):
        torch.compile(model, fullgraph=True)(workspace)


def test_a_workspace_is_marked_as_one_that_stays_where_it_is() -> None:
    """Or Inductor would make no CUDA graphs: tests.gpu.test_cudagraph_trees."""
    params = MoEEpCommParams(EXPERTS, TOP_K, CAPACITY, HIDDEN, dtype=torch.float32)
    marked = torch.zeros(1)
    torch._dynamo.mark_static_address(marked)
    with create_communication(BootstrapConfig(1, 0, device="cpu"), params, "cake") as comm:
        assert isinstance(comm, OneSidedAlltoAll)
        assert _dynamo_attributes(comm._workspace) == _dynamo_attributes(marked)


def _dynamo_attributes(tensor: Tensor) -> dict[str, object]:
    return {name: value for name, value in vars(tensor).items() if name.startswith("_dynamo")}
