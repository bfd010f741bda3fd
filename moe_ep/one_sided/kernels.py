"""What do the ops of a one-sided backend do on a bare workspace? The functions that each backend's
`kernels` module exports, for its own ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep import _native
from moe_ep._native import Geometry
from moe_ep.checks import check_type
from moe_ep.errors import MoEEpConfigError
from moe_ep.limits import DEFAULT_TIMEOUT_SEC
from moe_ep.one_sided.ops import OneSidedOps
from moe_ep.one_sided.received import ReceivedTokens, run_dispatch
from moe_ep.params import QuantFormat
from moe_ep.quantization import ScaleLayout, check_quantization, scale_shape


@dataclass(frozen=True)
class OneSidedKernels:
    """The functions on a workspace that call ops of the backend."""

    ops: OneSidedOps

    def initialize(self, workspace: Tensor, geometry: Geometry, ep_rank: int) -> None:
        """Prepare this rank's own row: epoch 0, nothing signalled. A barrier must follow before the
        first dispatch. On CUDA it waits for the stream."""
        self.ops.initialize(workspace, geometry.fields(), ep_rank)

    def forget(self, workspace: Tensor, geometry: Geometry, ep_rank: int) -> None:
        """Let go of what the process keeps about an initialised workspace outside of it; on the
        CPU, nothing. Waits for this rank's own rounds. To be called before the workspace is
        freed."""
        self.ops.forget(workspace, geometry.fields(), ep_rank)

    def dispatch(
        self,
        workspace: Tensor,
        geometry: Geometry,
        ep_rank: int,
        topk_ids: Tensor,
        payloads: Sequence[Tensor],
        topk_weights: Tensor | None = None,
        *,
        tokens_per_rank: int | None = None,
        invalid_expert_id: int = -1,
        eplb_local_stats: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
        timeout_sec: int = DEFAULT_TIMEOUT_SEC,
        enable_pdl: bool = True,
    ) -> ReceivedTokens:
        """Send every token's payload rows once to each rank that owns one of its experts.
        Collective.

        topk_ids: [n, top_k] int32 or int64, contiguous.
        payloads: 1 to MAX_PAYLOADS tensors [n, columns] of any dtype with dense rows, together at
            most `geometry.dispatch_bytes_per_token` bytes a token.
        topk_weights: [n, top_k] float32, contiguous, or None (on all ranks).
        tokens_per_rank: the largest n over the ranks, equal on all; None:
            `geometry.max_tokens_per_rank`.
        active_rank_mask: [ceil(ep_size / 64)] torch.uint64 in host memory, or on the workspace's
            device: then it is read when the kernel runs. None: all ranks are active.
        enable_pdl: on CUDA, whether the kernel may start while the one before it still runs.

        Raises MoEEpConfigError, MoEEpStateError, MoEEpTimeoutError as `MoEEpCommunication.dispatch`
        does.
        """
        tpr = geometry.max_tokens_per_rank if tokens_per_rank is None else tokens_per_rank
        return run_dispatch(
            self.ops,
            workspace,
            geometry,
            geometry.fields(),
            ep_rank,
            topk_ids,
            topk_weights,
            list(payloads),
            eplb_local_stats=eplb_local_stats,
            active_rank_mask=active_rank_mask,
            invalid_expert_id=invalid_expert_id,
            tokens_per_rank=tpr,
            timeout_sec=timeout_sec,
            enable_pdl=enable_pdl,
        )

    def combine(
        self,
        workspace: Tensor,
        geometry: Geometry,
        ep_rank: int,
        expert_output: Tensor,
        num_tokens: int,
        *,
        output_dtype: QuantFormat | None = None,
        output_scales: Tensor | None = None,
        output_scalar_scale: float = 1.0,
        sf_layout: ScaleLayout = ScaleLayout.LINEAR,
        use_low_precision_combine: bool = False,
        active_rank_mask: Tensor | None = None,
        timeout_sec: int = DEFAULT_TIMEOUT_SEC,
        enable_pdl: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Bring the partial rows back to their sources and sum them in float32, in ascending order
        of the owner. Collective.

        expert_output: [ep_size * tokens_per_rank, hidden_size] float32, float16 or bfloat16, rows
            dense.
        num_tokens: what this rank dispatched.
        output_dtype: None: the sums are rounded to the dtype of expert_output. QuantFormat.MXFP8,
            MXFP4 or NVFP4: they are quantised from float32 for the next matrix multiplication.
        output_scales: torch.uint8 tensor that receives the scales; None: a new one.
        output_scalar_scale: the global scale of NVFP4, finite and positive.
        sf_layout: layout of the scales.
        use_low_precision_combine: whether rows travel as scaled FP8, see CakeAlltoAllConfig; the
            same on all ranks. A row takes `hidden_size + 4 * ceil(hidden_size / 128)` of the
            `geometry.combine_bytes_per_token`; expert_output is not the `combine_input_buffer`.
            But cake, on CUDA with `spans_gpus=0` and no output_dtype, leaves bfloat16 rows that
            fit there as they are, to the same bits; then it may be.
        active_rank_mask: the one that dispatch got.
        enable_pdl: as in dispatch.

        Returns [num_tokens, hidden_size], or for a QuantFormat `(values, scales)`, both
        torch.uint8: values [num_tokens, bytes of a row], scales [padded rows, padded blocks].
        """
        if expert_output.dim() != 2:
            raise MoEEpConfigError(
                f"expert_output must be 2-D [ep_size * tokens_per_rank, hidden_size], got "
                f"{list(expert_output.shape)}."
            )
        rows, hidden_size = expert_output.shape
        check_type("sf_layout", sf_layout, ScaleLayout)
        if output_dtype is None:
            _check_unquantised(output_scales, output_scalar_scale, sf_layout)
        else:
            names = ("output_dtype", "output_scalar_scale")
            check_quantization(output_dtype, output_scalar_scale, names)
            _check_output_scales(
                output_scales, scale_shape(output_dtype, num_tokens, hidden_size, sf_layout)
            )
        tokens_per_rank = rows // geometry.ep_size
        fields = geometry.fields()
        where = (
            workspace,
            expert_output,
            active_rank_mask,
            fields,
            ep_rank,
            num_tokens,
            tokens_per_rank,
        )
        what = (hidden_size, expert_output.dtype, timeout_sec)
        how = (enable_pdl, use_low_precision_combine)
        if output_dtype is None:
            combined: Tensor = self.ops.combine(*where, *what, *how)
            return combined
        values, scales = self.ops.combine_quantized(
            *where,
            *what,
            int(_native.QuantFormat.__members__[output_dtype.name]),
            int(_native.ScaleLayout.__members__[sf_layout.name]),
            output_scalar_scale,
            *how,
        )
        if output_scales is None:
            return values, scales
        output_scales.copy_(scales.view(output_scales.shape))
        return values, output_scales

    def check(self, workspace: Tensor, geometry: Geometry, ep_rank: int) -> None:
        """Wait for this rank's own rounds and raise what they recorded: MoEEpTimeoutError,
        MoEEpDisagreementError, or MoEEpInputError for the round in flight."""
        self.ops.check(workspace, geometry.fields(), ep_rank)


def _check_unquantised(scales: Tensor | None, scalar_scale: float, layout: ScaleLayout) -> None:
    given = {
        "output_scales must be None": None if scales is None else f"a {type(scales).__name__}",
        "output_scalar_scale must be 1.0": None if scalar_scale == 1.0 else scalar_scale,
        "sf_layout must be LINEAR": None if layout is ScaleLayout.LINEAR else layout.name,
    }
    for wanted, got in given.items():
        if got is not None:
            raise MoEEpConfigError(
                f"{wanted} without an output_dtype, where nothing is quantised, got {got}."
            )


def _check_output_scales(output_scales: Tensor | None, shape: tuple[int, int]) -> None:
    if output_scales is None:
        return
    check_type("output_scales", output_scales, Tensor)
    if not output_scales.is_contiguous():
        raise MoEEpConfigError(
            f"output_scales must be contiguous, got strides {list(output_scales.stride())} for "
            f"shape {list(output_scales.shape)}."
        )
    wanted = shape[0] * shape[1]
    if output_scales.dtype != torch.uint8 or output_scales.numel() != wanted:
        raise MoEEpConfigError(
            f"output_scales must be torch.uint8 with {wanted} elements, got "
            f"{output_scales.dtype} with {output_scales.numel()}."
        )


def workspace_size_per_rank(geometry: Geometry) -> int:
    """Return the bytes of one rank's row of the workspace."""
    return geometry.segment_bytes


def sanitize_expert_ids(
    topk_ids: Tensor, recv_token_counts: Tensor, invalid_expert_id: int
) -> None:
    """Give every row without a token the invalid id, in place.

    topk_ids: [ep_size, tokens_per_rank, top_k] int32, contiguous; recv_token_counts: [ep_size]
        int32.
    """
    torch.ops.moe_ep.sanitize_expert_ids(topk_ids, recv_token_counts, invalid_expert_id)


def active_rank_mask(
    ranks: Sequence[int], ep_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return [ceil(ep_size / 64)] torch.uint64 with bit i set for each active rank i."""
    mask: Tensor = torch.ops.moe_ep.active_rank_mask(list(ranks), ep_size)
    return mask.to(device)
