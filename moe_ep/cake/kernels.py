"""What do cake's ops do on a bare workspace? For callers that bring their own memory and their own
state machine.

The order of calls, on every rank: `initialize`, a barrier of the caller's, then rounds of
`dispatch` and `combine`, at last `forget`. The ranks may be processes over shared memory, or on the
CPU threads of one process over a plain tensor (ops release the GIL).

A workspace is a torch.uint8 tensor [ep_size, >= workspace_size_per_rank(geometry)] whose row r is
the memory of rank r, each row starting on a 64-byte boundary. Every function checks what it can
before it writes anything.

On CUDA all other tensors are on the workspace's device, and calls run on torch's current stream and
wait for nothing, except where they say so. Whether dispatch and combine alternate, and whether both
get the same sizes, is up to the caller there. A geometry with `low_latency_tokens` of
`_native.low_latency_tokens(ep_size, top_k, max_tokens_per_rank)` has the fast way for few tokens.
Layers of several `num_experts` and `top_k` take turns, a round each, in a workspace of geometries
that differ in nothing else and have one `max_top_k`.
"""

from __future__ import annotations

from typing import Final

from moe_ep._native import Geometry
from moe_ep.one_sided.kernels import (
    OneSidedKernels,
    active_rank_mask,
    sanitize_expert_ids,
    workspace_size_per_rank,
)
from moe_ep.one_sided.ops import OneSidedOps
from moe_ep.one_sided.received import (
    ReceivedTokens,
    combine_input_buffer,
    received_rows,
    wrap_workspace,
)

__all__ = [
    "Geometry",
    "ReceivedTokens",
    "active_rank_mask",
    "check",
    "combine",
    "combine_input_buffer",
    "dispatch",
    "forget",
    "initialize",
    "received_rows",
    "sanitize_expert_ids",
    "workspace_size_per_rank",
    "wrap_workspace",
]

KERNELS: Final = OneSidedKernels(OneSidedOps.of("cake"))

initialize = KERNELS.initialize
dispatch = KERNELS.dispatch
combine = KERNELS.combine
check = KERNELS.check
forget = KERNELS.forget
