"""Does a one-sided backend refuse what would give wrong data, before any side effect?

One rank, or two as threads. Each refusal is followed by a round that must be right.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpConfigError,
    MoEEpInputError,
    MoEEpStateError,
    QuantFormat,
    create_communication,
    estimate_workspace_bytes,
)
from moe_ep.cake import kernels
from moe_ep.errors import MoEEpDisagreementError
from moe_ep.quantization import ScaleLayout
from tests.backends import ALL, Backend

HIDDEN, CAPACITY = 4, 4
PARAMS = MoEEpCommParams(4, 2, CAPACITY, HIDDEN, dtype=torch.float32)
IDS = torch.tensor([[0, 1], [-1, -1], [3, 2]])
ROWS = torch.arange(3 * HIDDEN, dtype=torch.float32).view(3, HIDDEN) + 1
SUMS = torch.where((IDS >= 0).any(1, keepdim=True), ROWS, 0.0)


@pytest.fixture(params=[one for one in ALL if one.one_sided], ids=str)
def backend(request: pytest.FixtureRequest) -> Backend:
    one: Backend = request.param
    return one


@pytest.fixture
def comm(backend: Backend) -> Iterator[MoEEpCommunication]:
    made = create_communication(BootstrapConfig(1, 0, device="cpu"), PARAMS, backend.name)
    with made, torch.no_grad():  # where dispatch returns views of the workspace
        yield made


def assert_a_round_is_right(comm: MoEEpCommunication) -> None:
    assert torch.equal(comm.combine(comm.dispatch(ROWS, IDS).hidden_states), SUMS)


def mappings_of_memfd() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:")


def test_destroy_gives_the_memory_back_while_the_object_lives(backend: Backend) -> None:
    gc.collect()  # what tests before this one have left
    before = mappings_of_memfd()
    comm = create_communication(BootstrapConfig(1, 0, device="cpu"), PARAMS, backend.name)
    assert mappings_of_memfd() == before + 1
    comm.destroy()
    assert mappings_of_memfd() == before


class Capture:
    """Stands in for two GPUs, of which one captures a CUDA graph; comm is on cuda:1."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        comm: MoEEpCommunication,
        current: int,
        captured: int | None,
    ) -> None:
        self.current, self.captured = current, captured
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        elsewhere = replace(comm._bootstrap, device=torch.device("cuda", 1))
        monkeypatch.setattr(comm, "device", elsewhere.torch_device)
        monkeypatch.setattr(comm, "_bootstrap", elsewhere)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: self.current == self.captured
        )
        monkeypatch.setattr(torch.cuda, "device", self.on)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before


@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_a_capture_that_a_call_would_not_be_part_of_is_refused(
    comm: MoEEpCommunication, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    if call == "combine":
        received = comm.dispatch(ROWS, IDS).hidden_states
    with monkeypatch.context() as patch:
        Capture(patch, comm, current=0, captured=0)
        with pytest.raises(MoEEpStateError, match=rf"{call} while .*on cuda:0, .* of cuda:1"):
            comm.dispatch(ROWS, IDS) if call == "dispatch" else comm.combine(received)
    if call == "combine":
        assert torch.equal(comm.combine(received), SUMS)
    assert_a_round_is_right(comm)


@pytest.mark.parametrize(("current", "captured"), [(1, 1), (0, None), (1, None), (1, 0)])
def test_other_captures_do_not_concern_it(
    comm: MoEEpCommunication,
    monkeypatch: pytest.MonkeyPatch,
    current: int,
    captured: int | None,
) -> None:
    with monkeypatch.context() as patch:
        Capture(patch, comm, current, captured)
        # It gets as far as the arguments, which are not on a GPU.
        with pytest.raises(MoEEpConfigError, match="hidden_states"):
            comm.dispatch(ROWS, IDS)
    assert_a_round_is_right(comm)


@pytest.mark.parametrize("strides", [(0, 0), (1, 0), (1, 7)])
def test_no_tokens_may_come_with_any_strides(
    comm: MoEEpCommunication, strides: tuple[int, int]
) -> None:
    received = comm.dispatch(ROWS.as_strided((0, HIDDEN), strides), IDS[:0])
    assert received.recv_token_counts.tolist() == [0]
    assert comm.combine(received.hidden_states).shape == (0, HIDDEN)
    assert_a_round_is_right(comm)


def test_output_inside_the_workspace_is_refused(comm: MoEEpCommunication) -> None:
    received = comm.dispatch(ROWS, IDS)
    buffer = comm.get_combine_input_buffer()
    assert buffer is not None
    for output in (buffer[:3], received.hidden_states[:3]):
        with pytest.raises(MoEEpConfigError, match="output must not lie in the workspace"):
            comm.combine(received.hidden_states, output=output)
    assert torch.equal(comm.combine(received.hidden_states), SUMS)
    assert_a_round_is_right(comm)


def test_received_rows_of_an_earlier_round_are_refused(comm: MoEEpCommunication) -> None:
    received = comm.dispatch(ROWS, IDS)
    comm.combine(received.hidden_states)
    with pytest.raises(MoEEpConfigError, match=r"a payload must not lie in the workspace.*clone"):
        comm.dispatch(received.hidden_states[:3], IDS)
    assert_a_round_is_right(comm)


@pytest.mark.parametrize("name", ["topk_ids", "topk_weights"])
def test_routing_of_an_earlier_round_is_refused(comm: MoEEpCommunication, name: str) -> None:
    """Peers write this round's ids and weights where those of the last one lie."""
    weights = torch.ones(len(IDS), IDS.shape[1])
    earlier = comm.dispatch(ROWS, IDS, weights)
    comm.combine(earlier.hidden_states)
    routing = {"topk_ids": IDS, "topk_weights": weights}
    routing[name] = getattr(earlier, name)[: len(IDS)]
    with pytest.raises(MoEEpConfigError, match=rf"{name} must not lie in the workspace.*clone"):
        comm.dispatch(ROWS, **routing)
    assert_a_round_is_right(comm)


def test_a_combine_buffer_that_the_workspace_has_no_room_for_is_refused() -> None:
    """It would reach into a peer's segment. Rows in low precision are shorter than bfloat16."""
    sizes = {"ep_size": 2, "num_experts": 4, "top_k": 2, "max_tokens_per_rank": 8}
    geometry = kernels.Geometry(
        **sizes, dispatch_bytes_per_token=256, combine_bytes_per_token=128 + 4
    )
    workspace = torch.zeros(2, geometry.segment_bytes, dtype=torch.uint8)
    with pytest.raises(MoEEpConfigError, match=r"hidden_size=128.*256 bytes.*room for 1 to 132"):
        kernels.combine_input_buffer(workspace, geometry, 0, 8, 128, torch.bfloat16)
    with pytest.raises(MoEEpConfigError, match=r"tokens_per_rank must be in \[0, 8\], got 9"):
        kernels.combine_input_buffer(workspace, geometry, 0, 9, 66, torch.bfloat16)
    fitting = kernels.combine_input_buffer(workspace, geometry, 0, 8, 66, torch.bfloat16)
    assert fitting.shape == (16, 66)


def test_more_packet_tokens_than_a_warp_has_lanes_are_refused() -> None:
    sizes = {"ep_size": 2, "num_experts": 4, "top_k": 2, "max_tokens_per_rank": 64}
    rows = {"dispatch_bytes_per_token": 16, "combine_bytes_per_token": 16}
    with pytest.raises(ValueError, match=r"low_latency_tokens must be in \[0, 32\], got 33"):
        kernels.Geometry(**sizes, **rows, low_latency_tokens=33)
    assert kernels.Geometry(**sizes, **rows, low_latency_tokens=32).max_tokens_per_rank == 64


def test_a_geometry_with_more_picks_than_experts_is_refused() -> None:
    sizes = {"ep_size": 2, "num_experts": 3, "max_tokens_per_rank": 8}
    rows = {"dispatch_bytes_per_token": 16, "combine_bytes_per_token": 16}
    with pytest.raises(ValueError, match="top_k must not exceed num_experts=3, got 4"):
        kernels.Geometry(**sizes, **rows, top_k=4)
    assert kernels.Geometry(**sizes, **rows, top_k=3).top_k == 3


@pytest.mark.parametrize(
    "part", [lambda b: b[:1].expand(4, HIDDEN), lambda b: b.flip(0)[:0], lambda b: b[1:]]
)
def test_parts_of_the_combine_buffer_are_no_expert_output(
    comm: MoEEpCommunication, part: Callable[[Tensor], Tensor]
) -> None:
    received = comm.dispatch(ROWS, IDS)
    buffer = comm.get_combine_input_buffer()
    assert buffer is not None
    with pytest.raises(MoEEpConfigError):
        comm.combine(part(buffer))
    assert torch.equal(comm.combine(received.hidden_states), SUMS)


def test_output_that_is_not_contiguous_is_written_also_with_an_invalid_id(
    comm: MoEEpCommunication,
) -> None:
    ids = IDS.clone()
    ids[0, 0] = 4
    output = torch.full((HIDDEN, 3), -1.0).t()
    received = comm.dispatch(ROWS, ids)
    with pytest.raises(MoEEpInputError):
        comm.combine(received.hidden_states, output=output)
    assert torch.equal(output, SUMS)
    assert_a_round_is_right(comm)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 2**31 - 1, "max_tokens_per_rank": 2**31 - 1},
        {"hidden_size": 2**31},
        {"num_experts": 2**31},
        {"max_tokens_per_rank": 2**60},
    ],
)
def test_sizes_past_the_limits_name_value_and_limit(
    backend: Backend, changes: dict[str, int]
) -> None:
    sizes = {"num_experts": 4, "top_k": 2, "max_tokens_per_rank": 8, "hidden_size": 64, **changes}
    config, bootstrap = backend.communication.config_type(), BootstrapConfig(1, 0, device="cpu")
    with pytest.raises(MoEEpConfigError, match=r"\d.*got.*\d"):
        estimate_workspace_bytes(MoEEpCommParams(**sizes), 1, config, device="cpu")
    with pytest.raises(MoEEpConfigError, match=r"\d.*got.*\d"):
        create_communication(bootstrap, MoEEpCommParams(**sizes), backend.name)


def test_workspace_bytes_are_what_was_estimated(comm: MoEEpCommunication) -> None:
    estimated = estimate_workspace_bytes(PARAMS, 1, comm.config, device="cpu")
    assert comm.workspace_bytes == estimated
    assert estimated % 4096 == 0


def test_low_precision_rows_take_about_half_of_the_combine_memory(backend: Backend) -> None:
    params = MoEEpCommParams(4, 2, 4096, 1024)
    configured: Any = backend.communication.config_type
    full, low = (
        estimate_workspace_bytes(params, 2, configured(use_low_precision_combine=low), device="cpu")
        for low in (False, True)
    )
    # 1024 + 4 * 8 bytes, from one row to the next in whole lines of 128.
    assert full - low == 2 * 4096 * (2 * 1024 - 1152)


def test_use_low_precision_combine_must_be_a_bool(backend: Backend) -> None:
    with pytest.raises(TypeError, match="use_low_precision_combine must be a bool, got 1"):
        backend.communication.config_type(use_low_precision_combine=1)  # type: ignore[call-arg]


def test_a_mask_must_be_a_tensor_of_this_group_s_ranks(backend: Backend) -> None:
    bootstrap = BootstrapConfig(1, 0, device="cpu")
    with create_communication(bootstrap, PARAMS, backend.name, enable_rank_mask=True) as comm:
        with pytest.raises(TypeError, match=r"active_rank_mask must be a torch.Tensor, got list"):
            comm.dispatch(ROWS, IDS, active_rank_mask=[0])  # type: ignore[call-arg]
        two_ranks = kernels.active_rank_mask([0, 1], 2)
        with pytest.raises(MoEEpConfigError, match="ranks below ep_size=1 only, got 3 as its last"):
            comm.dispatch(ROWS, IDS, active_rank_mask=two_ranks)  # type: ignore[call-arg]
        nobody = kernels.active_rank_mask([], 1)
        with pytest.raises(MoEEpConfigError, match=r"the caller's own rank 0, got ranks \(none\)"):
            comm.dispatch(ROWS, IDS, active_rank_mask=nobody)  # type: ignore[call-arg]
        assert_a_round_is_right(comm)


def test_a_mask_must_be_on_the_cpu_or_the_device(backend: Backend) -> None:
    bootstrap = BootstrapConfig(1, 0, device="cpu")
    with create_communication(bootstrap, PARAMS, backend.name, enable_rank_mask=True) as comm:
        elsewhere = torch.empty(1, dtype=torch.uint64, device="meta")
        with pytest.raises(MoEEpConfigError, match="active_rank_mask must be on cpu, got meta"):
            comm.dispatch(ROWS, IDS, active_rank_mask=elsewhere)  # type: ignore[call-arg]
        assert_a_round_is_right(comm)


@pytest.mark.parametrize("enable_pdl", [None, True, False])
def test_enable_pdl_is_accepted_everywhere(backend: Backend, enable_pdl: bool | None) -> None:
    bootstrap = BootstrapConfig(1, 0, device="cpu")
    with create_communication(bootstrap, PARAMS, backend.name, enable_pdl=enable_pdl) as comm:
        assert_a_round_is_right(comm)


def test_enable_pdl_must_be_a_bool(backend: Backend) -> None:
    with pytest.raises(TypeError, match="enable_pdl must be a bool or None, got 1"):
        backend.communication.config_type(enable_pdl=1)  # type: ignore[call-arg]


def test_a_backend_says_why_it_cannot_run_on_a_device(backend: Backend) -> None:
    reason = backend.communication.unsupported_reason
    assert reason() is None
    assert reason(torch.device("cpu")) is None
    meta = reason(torch.device("meta"))
    assert meta == f"{backend} runs on the CPU and on CUDA devices, got device meta"
    missing = reason(torch.device("cuda", 99))
    assert missing is not None
    assert any(why in missing for why in ("no CUDA kernels", "no CUDA device", "no cuda:99"))


def test_a_forked_child_is_told_so(comm: MoEEpCommunication) -> None:
    child = os.fork()
    if child == 0:
        try:
            comm.dispatch(ROWS, IDS)
        except MoEEpStateError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_a_round_is_right(comm)


class Threads:
    """Two ranks as threads over one plain tensor."""

    def __init__(self) -> None:
        self.geometry = kernels.Geometry(
            ep_size=2,
            num_experts=4,
            top_k=2,
            max_tokens_per_rank=CAPACITY,
            dispatch_bytes_per_token=4 * HIDDEN,
            combine_bytes_per_token=4 * HIDDEN,
        )
        self.workspace = torch.zeros(2, self.geometry.segment_bytes, dtype=torch.uint8)
        for rank in range(2):
            kernels.initialize(self.workspace, self.geometry, rank)

    def run(self, body: Callable[[Threads, int], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda rank: body(self, rank), range(2), timeout=200))

    def dispatch(self, rank: int, **changes: Any) -> kernels.ReceivedTokens:
        where = (self.workspace, self.geometry, rank)
        return kernels.dispatch(*where, IDS, [ROWS], **{"timeout_sec": 60, **changes})

    def combine(self, rank: int, rows: Tensor, **changes: Any) -> Any:
        where = (self.workspace, self.geometry, rank)
        return kernels.combine(*where, rows, 3, **{"timeout_sec": 60, **changes})


def round_after_disagreement(threads: Threads, rank: int) -> list[str]:
    said = []
    for _ in range(500):
        with pytest.raises(MoEEpDisagreementError) as caught:
            threads.dispatch(rank, tokens_per_rank=3 + rank)
        said.append(str(caught.value))
        threads.combine(rank, threads.dispatch(rank, tokens_per_rank=4).payloads[0])
    return said


def test_a_disagreement_shows_the_values_of_its_own_round() -> None:
    for said in Threads().run(round_after_disagreement):
        for text in said:
            assert "rank 0: tokens_per_rank=3," in text, text
            assert "rank 1: tokens_per_rank=4," in text, text


MXFP8 = {"output_dtype": QuantFormat.MXFP8}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"output_scales": torch.empty(3, 1).byte()}, MoEEpConfigError, "output_scales must be No"),
        ({"output_scalar_scale": 2.0}, MoEEpConfigError, r"output_scalar_scale must be 1.0.*got 2"),
        ({"sf_layout": ScaleLayout.SWIZZLE_8x4}, MoEEpConfigError, r"sf_layout must be LINEAR.*8x"),
        ({"output_dtype": "mxfp8"}, MoEEpConfigError, "output_dtype must be one of MXFP8"),
        ({**MXFP8, "output_scalar_scale": 2.0}, MoEEpConfigError, "output_scalar_scale must be 1"),
        ({**MXFP8, "sf_layout": "linear"}, TypeError, "sf_layout must be a ScaleLayout, got str"),
        ({**MXFP8, "output_scales": [0]}, TypeError, r"output_scales must be a torch.Tensor, got"),
        (
            {**MXFP8, "output_scales": torch.empty(1).byte().expand(3)},
            MoEEpConfigError,
            "output_scales must be contiguous",
        ),
    ],
)
def test_options_of_quantised_sums_are_refused_before_anything_is_sent(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    def body(threads: Threads, rank: int) -> None:
        received = threads.dispatch(rank)
        with pytest.raises(error, match=message):
            threads.combine(rank, received.payloads[0], **options)
        threads.combine(rank, received.payloads[0])

    Threads().run(body)


def other_mask_in_combine(threads: Threads, rank: int) -> None:
    received = threads.dispatch(rank)
    alone = kernels.active_rank_mask([rank], 2)
    with pytest.raises(MoEEpConfigError, match=f"dispatch got.* 0, 1, got one with ranks {rank}:"):
        threads.combine(rank, received.payloads[0], active_rank_mask=alone)
    threads.combine(rank, received.payloads[0])


def test_combine_takes_the_mask_of_its_dispatch_only() -> None:
    Threads().run(other_mask_in_combine)


def other_width_in_combine(threads: Threads, rank: int) -> None:
    received = threads.dispatch(rank)
    with pytest.raises(MoEEpConfigError, match="expert outputs of different width"):
        threads.combine(rank, received.payloads[0][:, : HIDDEN - rank].contiguous())
    again = threads.dispatch(rank)
    threads.combine(rank, again.payloads[0])


def test_ranks_that_combine_rows_of_other_width_all_raise() -> None:
    Threads().run(other_width_in_combine)


def test_wrong_dtypes_are_type_errors_at_the_kernel_level() -> None:
    threads = Threads()
    with pytest.raises(TypeError, match="topk_ids must be int32 or int64"):
        kernels.dispatch(threads.workspace, threads.geometry, 0, IDS.to(torch.uint8), [ROWS])
    with pytest.raises(TypeError, match="float32, float16 or bfloat16"):
        threads.combine(0, torch.zeros(8, HIDDEN, dtype=torch.int32))
    with pytest.raises(MoEEpConfigError, match="expert_output must be 2-D"):
        threads.combine(0, torch.zeros(2, 4, HIDDEN))
