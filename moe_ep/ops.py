"""What does torch know of the library? Loads the op library, and gives its ops their fake
implementations.

The ops live in `torch.ops.moe_ep`; their schemas stand in csrc/ops/library.cpp. Fakes derive
shapes, dtypes and strides from shapes alone, so that a round traces into one graph. `geometry` is
`Geometry.fields()` of `moe_ep._native`.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from moe_ep import _native
from moe_ep.inductor_views import teach_inductor

_library = find_spec("moe_ep._ops")
if _library is None or _library.origin is None:
    raise ImportError(
        "moe_ep._ops is not built. In a checkout: python setup.py build_ext --inplace. "
        "To install: pip install --no-build-isolation ."
    )
torch.ops.load_library(_library.origin)
torch.ops.moe_ep.set_interrupt_check(_native.interrupt_check())
torch.ops.moe_ep.set_error_raiser(_native.error_raiser())


ONE_SIDED_BACKENDS = ("cake", "one_sided")
"""What the names of their ops begin with: the same ops, in two ways on CUDA."""


def has_cuda_kernels() -> bool:
    """Return whether the library was built with its kernels for CUDA devices."""
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key("moe_ep::cake_dispatch", "CUDA")
    return found


def code_capability(device_capability: tuple[int, int]) -> tuple[int, int] | None:
    """Return the compute capability of the code that a CUDA device would run, which may be older
    than the device; None if the library has none for it. Needs `has_cuda_kernels()`."""
    major, minor = device_capability
    code: int = torch.ops.moe_ep.code_capability(10 * major + minor)
    return divmod(code, 10) if code > 0 else None


def _dispatch(
    workspace: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    payloads: list[Tensor],
    eplb_local_stats: Tensor | None,
    active_rank_mask: Tensor | None,
    geometry: list[int],
    ep_rank: int,
    invalid_expert_id: int,
    tokens_per_rank: int,
    timeout_sec: int,
    enable_pdl: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    teach_inductor(*ONE_SIDED_BACKENDS)  # here, since importing it takes a second
    ep_size, top_k = workspace.shape[0], topk_ids.shape[1]
    rows = ep_size * tokens_per_rank
    stats = (0, 0) if eplb_local_stats is None else (ep_size, eplb_local_stats.shape[0])
    return (
        topk_ids.new_empty((rows, top_k), dtype=torch.int32),
        topk_ids.new_empty((rows, top_k if topk_weights is not None else 0), dtype=torch.float32),
        topk_ids.new_empty((ep_size,), dtype=torch.int32),
        topk_ids.new_empty(stats, dtype=torch.int32),
    )


def _dispatch_in_place(
    workspace: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    payloads: list[Tensor],
    eplb_local_stats: Tensor | None,
    active_rank_mask: Tensor | None,
    geometry: list[int],
    ep_rank: int,
    invalid_expert_id: int,
    tokens_per_rank: int,
    timeout_sec: int,
    enable_pdl: bool = True,
) -> None:
    return None


def _received_rows(
    workspace: Tensor,
    geometry: list[int],
    ep_rank: int,
    tokens_per_rank: int,
    row_bytes: list[int],
    index: int,
    dtype: torch.dtype,
) -> Tensor:
    columns = row_bytes[index] // dtype.itemsize
    return workspace.new_empty((workspace.shape[0] * tokens_per_rank, columns), dtype=dtype)


@torch.library.register_fake("moe_ep::received_rows_view")
def _(
    workspace: Tensor,
    geometry: list[int],
    ep_rank: int,
    tokens_per_rank: int,
    row_bytes: list[int],
    index: int,
    dtype: torch.dtype,
) -> Tensor:
    shape = (workspace.shape[0] * tokens_per_rank, row_bytes[index] // dtype.itemsize)
    pitch = _native.row_pitch(row_bytes[index]) // dtype.itemsize
    return workspace.view(dtype).as_strided(shape, (pitch, 1))


@torch.library.register_fake("moe_ep::received_routing_view")
def _(
    workspace: Tensor, geometry: list[int], ep_rank: int, tokens_per_rank: int, index: int
) -> Tensor:
    ep_size, top_k, num_stats = workspace.shape[0], geometry[2], geometry[6]
    elements = workspace.view(torch.float32 if index == 1 else torch.int32)
    if index == 2:
        return elements.as_strided((ep_size,), (1,))
    rows, columns = (ep_size, num_stats) if index == 3 else (ep_size * tokens_per_rank, top_k)
    return elements.as_strided((rows, columns), (columns, 1))


def _combine(
    workspace: Tensor,
    expert_output: Tensor | None,
    active_rank_mask: Tensor | None,
    geometry: list[int],
    ep_rank: int,
    num_tokens: int,
    tokens_per_rank: int,
    hidden_size: int,
    dtype: torch.dtype,
    timeout_sec: int,
    enable_pdl: bool = True,
    low_precision: bool = False,
) -> Tensor:
    return workspace.new_empty((num_tokens, hidden_size), dtype=dtype)


def _combine_out(
    workspace: Tensor,
    expert_output: Tensor | None,
    active_rank_mask: Tensor | None,
    geometry: list[int],
    ep_rank: int,
    tokens_per_rank: int,
    timeout_sec: int,
    output: Tensor,
    enable_pdl: bool = True,
    low_precision: bool = False,
) -> None:
    return None


def _combine_quantized(
    workspace: Tensor,
    expert_output: Tensor | None,
    active_rank_mask: Tensor | None,
    geometry: list[int],
    ep_rank: int,
    num_tokens: int,
    tokens_per_rank: int,
    hidden_size: int,
    dtype: torch.dtype,
    timeout_sec: int,
    format: int,
    scale_layout: int,
    scalar_scale: float,
    enable_pdl: bool = True,
    low_precision: bool = False,
) -> tuple[Tensor, Tensor]:
    quant_format, layout = _native.QuantFormat(format), _native.ScaleLayout(scale_layout)
    tile = _native.rows_per_scale_tile(layout)
    scale_rows = (num_tokens + tile - 1) // tile * tile
    blocks = _native.scales_per_row(quant_format, hidden_size)
    return (
        workspace.new_empty((num_tokens, _native.quantized_row_bytes(quant_format, hidden_size))),
        workspace.new_empty((scale_rows, _native.padded_scale_blocks(layout, blocks))),
    )


@torch.library.register_fake("moe_ep::two_sided_initialize")
@torch.library.register_fake("moe_ep::two_sided_check")
@torch.library.register_fake("moe_ep::two_sided_forget")
def _on_workspace(workspace: Tensor, geometry: list[int], ep_rank: int) -> None:
    return None


def _abandon(workspace: Tensor, geometry: list[int], ep_rank: int, timeout_sec: int) -> None:
    return None


def _begin_shared_batch(
    workspace: Tensor, topk_ids: Tensor, geometry: list[int], ep_rank: int, timeout_sec: int
) -> None:
    return None


def _end_shared_batch(
    workspace: Tensor,
    geometry: list[int],
    ep_rank: int,
    num_tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    timeout_sec: int,
) -> Tensor:
    return workspace.new_empty((num_tokens, hidden_size), dtype=dtype)


torch.library.register_fake("moe_ep::two_sided_abandon", _abandon)


@torch.library.register_fake("moe_ep::leave")
def _(workspace: Tensor, ep_rank: int) -> None:
    return None


for _backend in ONE_SIDED_BACKENDS:
    for _name, _fake in {
        "initialize": _on_workspace,
        "dispatch": _dispatch,
        "dispatch_in_place": _dispatch_in_place,
        "received_rows": _received_rows,
        "combine": _combine,
        "combine_out": _combine_out,
        "combine_quantized": _combine_quantized,
        "abandon": _abandon,
        "begin_shared_batch": _begin_shared_batch,
        "end_shared_batch": _end_shared_batch,
        "check": _on_workspace,
        "forget": _on_workspace,
    }.items():
        torch.library.register_fake(f"moe_ep::{_backend}_{_name}", _fake)


@torch.library.register_fake("moe_ep::two_sided_prepare")
def _(
    workspace: Tensor,
    topk_ids: Tensor,
    geometry: list[int],
    ep_rank: int,
    invalid_expert_id: int,
    tokens_per_rank: int,
    row_bytes: list[int],
    has_weights: bool,
    timeout_sec: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ep_size, (num_tokens, top_k) = workspace.shape[0], topk_ids.shape
    return (
        topk_ids.new_empty((num_tokens, top_k), dtype=torch.int32),
        topk_ids.new_empty((num_tokens * min(ep_size, top_k),), dtype=torch.int32),
        topk_ids.new_empty((ep_size,), dtype=torch.int32),
        topk_ids.new_empty((ep_size,), dtype=torch.int32),
    )


@torch.library.register_fake("moe_ep::two_sided_alltoallv")
def _(
    workspace: Tensor,
    rows: list[Tensor],
    send_tokens: Tensor,
    geometry: list[int],
    ep_rank: int,
    timeout_sec: int,
    received: list[Tensor],
    recv_counts: Tensor,
    max_sm_count: int = 0,
) -> None:
    return None


@torch.library.register_fake("moe_ep::two_sided_combine")
def _(
    workspace: Tensor,
    expert_output: Tensor,
    send_tokens: Tensor,
    geometry: list[int],
    ep_rank: int,
    num_tokens: int,
    timeout_sec: int,
    max_sm_count: int = 0,
) -> Tensor:
    return expert_output.new_empty((num_tokens, expert_output.shape[1]))


@torch.library.register_fake("moe_ep::two_sided_combine_out")
def _(
    workspace: Tensor,
    expert_output: Tensor,
    send_tokens: Tensor,
    geometry: list[int],
    ep_rank: int,
    timeout_sec: int,
    output: Tensor,
    max_sm_count: int = 0,
) -> None:
    return None


@torch.library.register_fake("moe_ep::sanitize_expert_ids")
def _(topk_ids: Tensor, recv_token_counts: Tensor, invalid_expert_id: int) -> None:
    return None


@torch.library.register_fake("moe_ep::active_rank_mask")
def _(ranks: list[int], ep_size: int) -> Tensor:
    return torch.empty((_native.rank_mask_words(ep_size),), dtype=torch.uint64, device="cpu")


# ---------------------------------------------------------------- picks, on the host


@torch.library.register_fake("moe_ep::group_picks")
def _(
    topk_ids: Tensor,
    first_expert: int,
    alignment: int,
    counts: Tensor,
    offsets: Tensor,
    row_of_pick: Tensor,
    pick_of_row: Tensor,
) -> bool:
    return True  # as the answer depends on values: there is room for any picks


@torch.library.register_fake("moe_ep::rows_of_picks")
def _(
    source: Tensor, topk_ids: Tensor, first_expert: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = torch.library.get_ctx().new_dynamic_size(min=1)
    return (
        source.new_empty((num_rows, source.shape[1])),
        topk_ids.new_empty((num_rows, 1), dtype=torch.int64),
        topk_ids.new_empty(topk_ids.shape, dtype=torch.int64),
    )


@torch.library.register_fake("moe_ep::copy_rows")
def _(source: Tensor, index: Tensor, output: Tensor) -> None:
    return None


@torch.library.register_fake("moe_ep::sum_rows")
def _(
    rows: Tensor,
    weights: Tensor | None,
    row_of_pick: Tensor,
    output: Tensor,
    zero_others: bool = False,
) -> None:
    return None
