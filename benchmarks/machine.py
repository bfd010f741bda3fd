"""Where are the figures taken?"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from places import Place

import moe_ep


def machine() -> dict[str, Any]:
    """Return the host and the versions. The load is that of before, if called before."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": f"{platform.system()} {platform.release()}",
        "load_average_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "moe_ep": moe_ep.__version__,
    }


def gpu_machine() -> dict[str, Any]:
    """Return the GPU driver and the versions that CUDA code was built with; starts no context."""
    return {"driver": _driver_version(), "cuda": torch.version.cuda, "nccl": _nccl_version()}


def gpu_of(place: Place) -> dict[str, Any]:
    """Return what this rank sees of its GPU: under MPS its own share of the multiprocessors."""
    properties = torch.cuda.get_device_properties(place.device)
    return {
        "gpu": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors_per_rank": properties.multi_processor_count,
        "mps_share_percent": os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
    }


def _driver_version() -> str | None:
    """Return the driver's version, None where nobody tells."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.splitlines()[0].strip()
    return None


def _nccl_version() -> str | None:
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
