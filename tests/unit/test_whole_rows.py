"""Where do rows in low precision lie in the workspace as the experts give them?"""

from __future__ import annotations

import pytest
import torch

from moe_ep import CakeAlltoAllConfig, MoEEpCommParams, NVLinkOneSidedConfig
from moe_ep._native import Geometry, RowType
from moe_ep.one_sided.config import OneSidedConfig
from moe_ep.one_sided.workspace import geometry_of, rows_are_whole
from moe_ep.quantization import quantize_to_fp8

CUDA = torch.device("cuda")
LOW = CakeAlltoAllConfig(use_low_precision_combine=True)
NVLINK_LOW = NVLinkOneSidedConfig(use_low_precision_combine=True)


def fp8_bytes(hidden_size: int) -> int:
    """Of a row as it travels in low precision."""
    values, scales = quantize_to_fp8(torch.zeros(1, hidden_size))
    return values.nbytes + scales.nbytes


@pytest.mark.parametrize(
    ("config", "dtype", "spans_gpus", "whole"),
    [
        (LOW, torch.bfloat16, False, True),
        (LOW, torch.bfloat16, True, False),
        (LOW, torch.float16, False, False),
        (LOW, torch.float32, False, False),
        (NVLINK_LOW, torch.bfloat16, False, False),
        (CakeAlltoAllConfig(), torch.float32, True, True),
    ],
)
def test_rows_in_low_precision_are_whole_for_cake_on_one_gpu(
    config: OneSidedConfig, dtype: torch.dtype, spans_gpus: bool, whole: bool
) -> None:
    params = MoEEpCommParams(8, 2, 16, 1000, dtype)
    layout = geometry_of(params, 4, config, CUDA, spans_gpus=spans_gpus)
    assert rows_are_whole(params, config, layout) is whole


@pytest.mark.parametrize("hidden_size", [1, 4, 5, 1000, 7168])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_workspace_of_cake_has_room_for_either_kind_of_rows(
    hidden_size: int, dtype: torch.dtype
) -> None:
    params = MoEEpCommParams(8, 2, 16, hidden_size, dtype)
    one, several = (
        geometry_of(params, 4, LOW, CUDA, spans_gpus=spans_gpus) for spans_gpus in (False, True)
    )
    whole = params.combine_bytes_per_token if dtype == torch.bfloat16 else 0
    assert one.combine_bytes_per_token == max(whole, fp8_bytes(hidden_size))
    assert one.segment_bytes == several.segment_bytes


def test_where_rows_are_never_whole_there_is_room_for_fp8_only() -> None:
    params = MoEEpCommParams(8, 2, 16, 1000)
    for config, device in ((NVLINK_LOW, CUDA), (LOW, torch.device("cpu"))):
        layout = geometry_of(params, 4, config, device, spans_gpus=False)
        assert layout.combine_bytes_per_token == fp8_bytes(1000)


def test_rows_that_do_not_fit_as_they_are_travel_as_fp8() -> None:
    def layout(combine_bytes: int) -> Geometry:
        return Geometry(
            ep_size=2,
            num_experts=4,
            top_k=2,
            max_tokens_per_rank=8,
            dispatch_bytes_per_token=256,
            combine_bytes_per_token=combine_bytes,
            spans_gpus=0,
        )

    assert layout(256).reader_quantizes(128, RowType.BFLOAT16)
    assert not layout(255).reader_quantizes(128, RowType.BFLOAT16)
    assert not layout(256).reader_quantizes(128, RowType.FLOAT16)
