"""What do the ops of nvlink_one_sided do on a bare workspace? The same as those of
`moe_ep.cake.kernels`, in another way on CUDA: without the bulk-copy engine.

Workspaces and geometries are the same, too. `low_latency_tokens` of a geometry (up to
`_native.MAX_PACKET_TOKENS`) says which steps go as Lamport packets; with `prefers_packets=1` these
tokens come back as packets, too, wherever they are.
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

KERNELS: Final = OneSidedKernels(OneSidedOps.of("one_sided"))

initialize = KERNELS.initialize
dispatch = KERNELS.dispatch
combine = KERNELS.combine
check = KERNELS.check
forget = KERNELS.forget
