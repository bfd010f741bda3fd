"""Which settings does cake have?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moe_ep.one_sided.config import OneSidedConfig


@dataclass(frozen=True, kw_only=True)
class CakeAlltoAllConfig(OneSidedConfig):
    """Settings of the cake backend, besides those of every backend.

    extra_payload_bytes_per_token: bytes by which a torch.uint8 row given to dispatch may exceed
        the dispatch format's row.
    eplb_stats_num_experts: length of eplb_local_stats, 0..num_experts; 0: no statistics.
    enable_rank_mask: whether dispatch and combine accept active_rank_mask.
    use_low_precision_combine: whether expert rows travel back as scaled FP8, half the bytes of
        16 bits: every row is quantised by its owner as `moe_ep.quantization.quantize_to_fp8` does,
        rows that stay on their rank, too, and combine sums what `dequantize_fp8` gives of them. An
        element is off by at most 1/16 of itself, or 2**-18 of the largest of its block of 128 (of
        2**-100 where the largest is smaller); an infinity or NaN makes NaNs of its block.
        get_combine_input_buffer returns None, but for bfloat16 where all ranks are on one GPU:
        there rows stay as they are, and who sums them quantises them, to the same bits. On CUDA
        the workspace has room for either, wherever the ranks are.
    enable_pdl: on CUDA, whether a kernel may start while the one before it on the stream still
        runs (programmatic dependent launch). None: yes. Nothing on the CPU.
    """

    backend_name: ClassVar[str] = "cake"
    _reader_can_quantize: ClassVar[bool] = True
