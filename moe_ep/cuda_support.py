"""Can this build's kernels run on a device of this machine?"""

from __future__ import annotations

import torch

from moe_ep import ops
from moe_ep.checks import check_type

Capability = tuple[int, int]


def reason_against(
    backend: str, min_capability: Capability, device: torch.device | None
) -> str | None:
    """Return why a backend cannot run on a device of this machine, or None if it can.

    min_capability: the least compute capability of a CUDA device, and of the code for it.
    device: None asks whether any would do.
    """
    absent = reason_of_absence(backend, device)
    if absent is not None or device is None or device.type == "cpu":
        return absent
    if not ops.has_cuda_kernels():
        return "this build of moe_ep has no CUDA kernels"
    capability = torch.cuda.get_device_capability(device)
    if capability < min_capability:
        wanted, found = _version(min_capability), _version(capability)
        return f"{backend} needs compute capability {wanted} or newer, {device} has {found}"
    code = ops.code_capability(capability)
    if code is None or code < min_capability:
        has = "no code" if code is None else f"only code for {_version(code)}"
        return (
            f"{backend} needs code for compute capability {_version(min_capability)} or newer, and "
            f"this build of moe_ep has {has} for {device}, which has {_version(capability)}: build "
            f"it with TORCH_CUDA_ARCH_LIST={_version(capability)}"
        )
    return None


def reason_of_absence(backend: str, device: torch.device | None) -> str | None:
    """Return why there is no such device for a backend on this machine, or None if there is."""
    if device is None:
        return None
    check_type("device", device, torch.device)
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"{backend} runs on the CPU and on CUDA devices, got device {device}"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device on this machine"
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        return f"there is no {device}: torch finds {count} CUDA device(s)"
    return None


def _version(capability: Capability) -> str:
    return ".".join(map(str, capability))
