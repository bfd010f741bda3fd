"""Do schema, fake and implementation of every op agree? torch's own checks, with one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ep.ops  # noqa: F401  (loads the ops)
from moe_ep import BootstrapConfig, MoEEpCommParams, MoEEpDispatchResult, TorchDistAlltoAll
from moe_ep._native import FifoGeometry, Geometry
from moe_ep.cake import CakeAlltoAll
from moe_ep.ops import ONE_SIDED_BACKENDS
from moe_ep.reference import reference_combine, reference_dispatch

TOKENS, TOP_K, HIDDEN, CAPACITY, STATS = 3, 2, 40, 4, 5
GEOMETRY = Geometry(
    ep_size=1,
    num_experts=6,
    top_k=TOP_K,
    max_tokens_per_rank=CAPACITY,
    dispatch_bytes_per_token=2 * HIDDEN + 4,
    combine_bytes_per_token=2 * HIDDEN,
    eplb_stats_num_experts=STATS,
)
FIELDS = GEOMETRY.fields()
OPS = torch.ops.moe_ep
ROW_BYTES = [2 * HIDDEN, 4]
IDS = torch.tensor([[0, 5], [-1, 2], [-1, -1]])


DEVICES = [
    device
    for device in ("cpu", "cuda")
    if CakeAlltoAll.unsupported_reason(torch.device(device)) is None
]


def workspace() -> Tensor:
    memory = torch.zeros(1, GEOMETRY.segment_bytes, dtype=torch.uint8)
    OPS.one_sided_initialize(memory, FIELDS, 0)
    return memory


FIFOS = FifoGeometry(
    ep_size=1,
    num_experts=6,
    top_k=TOP_K,
    max_tokens_per_rank=CAPACITY,
    num_slots=2,
    slot_bytes=64,
)


def fifos() -> Tensor:
    memory = torch.zeros(1, FIFOS.segment_bytes, dtype=torch.uint8)
    OPS.two_sided_initialize(memory, FIFOS.fields(), 0)
    return memory


def prepare_arguments(memory: Tensor) -> tuple[Any, ...]:
    return memory, IDS.to(memory.device), FIFOS.fields(), 0, -1, CAPACITY, [2 * HIDDEN], False, 1


def alltoallv_arguments() -> tuple[Any, ...]:
    memory = fifos()
    _, send_tokens, _, recv_counts = OPS.two_sided_prepare(*prepare_arguments(memory))
    rows = torch.randn(TOKENS, HIDDEN).bfloat16()
    received = torch.zeros(CAPACITY, HIDDEN).bfloat16()
    return memory, [rows], send_tokens, FIFOS.fields(), 0, 1, [received], recv_counts


def sums_arguments() -> tuple[Any, ...]:
    arguments = alltoallv_arguments()
    OPS.two_sided_alltoallv(*arguments)
    memory, _, send_tokens, *_, (received,), _ = arguments
    return memory, received, send_tokens, FIFOS.fields(), 0


def dispatch_arguments(memory: Tensor) -> tuple[Any, ...]:
    return (
        memory,
        IDS.to(memory.device),
        torch.rand(TOKENS, TOP_K),
        [torch.randn(TOKENS, HIDDEN).bfloat16(), torch.rand(TOKENS, 1)],
        torch.arange(STATS, dtype=torch.int32),
        None,
        FIELDS,
        0,
        -1,
        CAPACITY,
        1,
    )


def dispatched() -> Tensor:
    memory = workspace()
    OPS.one_sided_dispatch(*dispatch_arguments(memory))
    return memory


def shared() -> Tensor:
    memory = workspace()
    OPS.one_sided_begin_shared_batch(memory, IDS, FIELDS, 0, 1)
    return memory


def combine_arguments() -> tuple[Any, ...]:
    expert_output = torch.randn(CAPACITY, HIDDEN).bfloat16()
    where = (dispatched(), expert_output, None, FIELDS, 0)
    return (*where, TOKENS, CAPACITY, HIDDEN, torch.bfloat16, 1)


class Stateless(TorchDistAlltoAll):
    """The reference of one rank, whose calls are legal in any order: torch's checks run an op many
    times."""

    def _require(self, state: str, call: str) -> None:
        self._shared.state = state

    def _dispatch(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, **how: Any
    ) -> MoEEpDispatchResult:
        self.given = topk_ids
        weights = None if topk_weights is None else [topk_weights]
        sizes = {"tokens_per_rank": how["tokens_per_rank"]}
        sent = reference_dispatch(self.params, 1, [hidden_states], [topk_ids], weights, **sizes)
        return MoEEpDispatchResult(**vars(sent[0]))

    def _combine(self, expert_output: Tensor, *, tokens_per_rank: int, **how: Any) -> Tensor:
        width, dtype = expert_output.shape[1], expert_output.dtype
        params = MoEEpCommParams(6, TOP_K, CAPACITY, width, dtype=dtype)
        sizes = {"tokens_per_rank": tokens_per_rank}
        return reference_combine(params, 1, [self.given], [expert_output], **sizes)[0]


ROUND = Stateless(
    BootstrapConfig(1, 0, device="cpu"),
    MoEEpCommParams(6, TOP_K, CAPACITY, HIDDEN, dtype=torch.float32),
)


def round_arguments(phase: str) -> tuple[Any, ...]:
    ids = IDS.clone()
    rows = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    name, flags = ROUND._graph_name, (True, True, True)
    if phase == "dispatch":
        # Without gradients: the check would give `link` one that no combine has given.
        weights = torch.rand(TOKENS, TOP_K)
        return rows.detach(), weights, ids, None, None, None, name, 1, CAPACITY, True, True
    ROUND.dispatch(rows.detach(), ids)
    if phase == "combine":
        made, link = torch.randn(CAPACITY, HIDDEN, requires_grad=True), torch.empty(0)
        return made, link, ids, None, name, 1, TOKENS, CAPACITY, *flags
    ROUND.combine(torch.zeros(CAPACITY, HIDDEN))
    if phase == "combine_backward":
        return rows.detach(), ids, None, name, 1, CAPACITY, *flags
    grads = (torch.randn(CAPACITY, HIDDEN), torch.randn(CAPACITY, TOP_K), None)
    return *grads, ids, None, name, CAPACITY, HIDDEN, torch.float32, *flags


ONE_SIDED_CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "initialize": lambda: (workspace(), FIELDS, 0),
    "dispatch": lambda: dispatch_arguments(workspace()),
    "dispatch_in_place": lambda: dispatch_arguments(workspace()),
    "received_rows": lambda: (dispatched(), FIELDS, 0, CAPACITY, ROW_BYTES, 1, torch.int32),
    "combine": combine_arguments,
    "combine_out": lambda: (
        *combine_arguments()[:5],
        CAPACITY,
        1,
        torch.empty(TOKENS, HIDDEN).bfloat16(),
    ),
    "combine_quantized": lambda: (*combine_arguments(), 2, 1, 3.0, True, True),
    "abandon": lambda: (dispatched(), FIELDS, 0, 1),
    "begin_shared_batch": lambda: (workspace(), IDS, FIELDS, 0, 1),
    "end_shared_batch": lambda: (shared(), FIELDS, 0, TOKENS, HIDDEN, torch.bfloat16, 1),
    "check": lambda: (dispatched(), FIELDS, 0),
    "forget": lambda: (workspace(), FIELDS, 0),
}
CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    **{
        f"{backend}_{op}": case
        for backend in ONE_SIDED_BACKENDS
        for op, case in ONE_SIDED_CASES.items()
    },
    "received_rows_view": lambda: (dispatched(), FIELDS, 0, CAPACITY, ROW_BYTES, 1, torch.int32),
    "received_routing_view": lambda: (dispatched(), FIELDS, 0, CAPACITY, 3),
    "two_sided_initialize": lambda: (fifos(), FIFOS.fields(), 0),
    "two_sided_prepare": lambda: prepare_arguments(fifos()),
    "two_sided_alltoallv": alltoallv_arguments,
    "two_sided_combine": lambda: (*sums_arguments(), TOKENS, 1),
    "two_sided_combine_out": lambda: (
        *sums_arguments(),
        1,
        torch.empty(TOKENS, HIDDEN).bfloat16(),
    ),
    "two_sided_check": lambda: (fifos(), FIFOS.fields(), 0),
    "two_sided_forget": lambda: (fifos(), FIFOS.fields(), 0),
    "sanitize_expert_ids": lambda: (
        torch.zeros(2, 3, 2, dtype=torch.int32),
        torch.tensor([1, 3], dtype=torch.int32),
        -1,
    ),
    "two_sided_abandon": lambda: (sums_arguments()[0], FIFOS.fields(), 0, 1),
    "group_picks": lambda: (
        torch.tensor([[2, 5], [4, 2]], dtype=torch.int32),
        2,
        2,
        torch.zeros(2, dtype=torch.long),
        torch.zeros(3, dtype=torch.long),
        torch.zeros(2, 2, dtype=torch.long),
        torch.zeros(4, dtype=torch.long),
    ),
    "rows_of_picks": lambda: (torch.randn(3, HIDDEN), IDS, 2, 4),
    "copy_rows": lambda: (torch.randn(3, 4), torch.tensor([2, 3]), torch.zeros(2, 4)),
    "sum_rows": lambda: (
        torch.randn(3, 4),
        torch.randn(2, 2),
        torch.tensor([[2, 3], [1, 0]]),
        torch.zeros(2, 4),
    ),
    "leave": lambda: (workspace(), 0),
    "active_rank_mask": lambda: ([0, 65], 70),
    "round_dispatch": lambda: round_arguments("dispatch"),
    "round_combine": lambda: round_arguments("combine"),
    "round_combine_backward": lambda: round_arguments("combine_backward"),
    "round_dispatch_backward": lambda: round_arguments("dispatch_backward"),
}


def test_every_op_has_a_case() -> None:
    schemas = [s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("moe_ep::")]
    names = {name.removeprefix("moe_ep::") for name in schemas}
    in_no_graph = {"set_interrupt_check", "set_error_raiser", "code_capability"}
    assert names - in_no_graph == set(CASES)


ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
CHECKS = {
    # It answers and mutates, which no graph can hold: they take torch's ops.
    "group_picks": ALL[:3],
    # Of the code that Inductor writes, in place of ops of a graph. Their fakes do not know where in
    # the workspace the views begin; shapes and strides are checked by that code.
    "received_rows_view": ALL[:2],
    "received_routing_view": ALL[:2],
}
# They have no kernels for CUDA.
ON_THE_HOST = ("abandon", "shared_batch", "leave", "_picks", "copy_rows", "sum_rows")
ON_DEVICES = [
    (op, device)
    for op in CASES
    for device in DEVICES
    if device == "cpu" or (not op.startswith("round") and not op.endswith(ON_THE_HOST))
]


@pytest.mark.parametrize(("op", "device"), ON_DEVICES)
def test_opcheck(op: str, device: str) -> None:
    with torch.device(device):
        arguments = CASES[op]()
    torch.library.opcheck(getattr(OPS, op).default, arguments, test_utils=CHECKS.get(op, ALL))
