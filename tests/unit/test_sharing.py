"""By which handles does a group share memory, and what does it say where it cannot?"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from moe_ep import _native
from moe_ep.construction import HostIdentity
from moe_ep.errors import MoEEpConfigError, MoEEpPlatformError
from moe_ep.sharing import Place, Probe, check_probes, forms_to_try, mapping_error

ROOT = Path(__file__).parents[2]

FD = _native.HandleForm.FILE_DESCRIPTOR
FABRIC = _native.HandleForm.FABRIC

GPU = Place(
    "cuda",
    available_bytes=1000,
    available_scope="GPU-a",
    gpu="cuda:0 (Device, GPU-a)",
    gpu_uuid="GPU-a",
    no_fabric="",
    fabric=(b"\1" * 16, 7),
)
HERE = HostIdentity("a", "boot-a", "net-1")
OTHER_NETWORK = HostIdentity("a", "boot-a", "net-2")
ELSEWHERE = HostIdentity("b", "boot-b", "net-9")


def probe(place: Place = GPU, host: HostIdentity = HERE) -> Probe:
    return Probe(host, place, "released", segment_bytes=90, mapped_bytes=100, nonce=b"")


NO_FABRIC = replace(GPU, no_fabric="cuMemCreate failed: NOT_PERMITTED", fabric=None)
NO_DESCRIPTOR = replace(GPU, no_descriptor="refused")


@pytest.mark.parametrize(
    ("second", "forms"),
    [
        (probe(), [FABRIC, FD]),
        (probe(NO_FABRIC), [FD]),
        (probe(NO_DESCRIPTOR), [FABRIC]),
        (probe(host=OTHER_NETWORK), [FABRIC]),
        (probe(host=ELSEWHERE), [FABRIC]),
        # In no domain, but on one host: nobody needs to be in one.
        (probe(replace(GPU, fabric=None)), [FABRIC, FD]),
    ],
)
def test_group_takes_what_all_ranks_can(second: Probe, forms: list[_native.HandleForm]) -> None:
    assert forms_to_try([probe(), second]) == forms
    assert forms_to_try([second, probe()]) == forms


@pytest.mark.parametrize(
    ("place", "host"),
    [
        (NO_FABRIC, OTHER_NETWORK),
        (NO_FABRIC, ELSEWHERE),
        (replace(NO_FABRIC, no_descriptor="refused"), HERE),
        (replace(GPU, fabric=(b"\1" * 16, 8)), ELSEWHERE),
        (replace(GPU, fabric=(b"\2" * 16, 7)), ELSEWHERE),
        (replace(GPU, fabric=None), ELSEWHERE),
    ],
)
def test_group_with_nothing_in_common_is_told_every_answer(
    place: Place, host: HostIdentity
) -> None:
    with pytest.raises(MoEEpPlatformError, match="no way in common") as caught:
        forms_to_try([probe(), probe(place, host)])
    message = str(caught.value)
    for part in ("rank 0: ", "rank 1: ", "IMEX channel", "torch_dist", str(host)):
        assert part in message
    for reason in (place.no_fabric, place.no_descriptor):
        assert reason in message


def test_two_hosts_in_no_domain_do_not_count_as_one_domain() -> None:
    nowhere = replace(GPU, fabric=None)
    with pytest.raises(MoEEpPlatformError, match="no way in common"):
        forms_to_try([probe(nowhere), probe(nowhere, ELSEWHERE)])


def test_cpu_and_gpu_in_one_group_are_refused() -> None:
    with pytest.raises(MoEEpConfigError, match=r"device must be .* rank 0: cuda; rank 1: cpu"):
        check_probes([probe(), probe(Place("cpu", 1000, 0))])


def test_segments_on_one_gpu_must_fit_together() -> None:
    small = probe(replace(GPU, available_bytes=199))
    with pytest.raises(
        MoEEpPlatformError, match=r"need 200 bytes .* on cuda:0 \(Device, GPU-a\), 199 are"
    ):
        check_probes([probe(), small])
    check_probes([probe(), probe(replace(GPU, available_bytes=200))])
    check_probes([probe(replace(GPU, available_scope="GPU-b")), small])


@pytest.mark.parametrize(
    ("access", "verdict"),
    [(False, ". There is no peer access"), (None, "whether there is no peer access"), (True, "")],
)
def test_mapping_that_fails_names_both_gpus(access: bool | None, verdict: str) -> None:
    peer = replace(GPU, gpu="cuda:1 (Device, GPU-b)", gpu_uuid="GPU-b")
    refused = RuntimeError("cuMemSetAccess failed: CUDA_ERROR_INVALID_DEVICE")
    with mock.patch.object(_native, "can_access_peer", return_value=access) as asked:
        message = str(mapping_error(GPU, 3, peer, torch.device("cuda", 0), refused))
    asked.assert_called_once_with(0, "GPU-b")
    for part in ("GPU-a", "GPU-b", "rank 3", str(refused)):
        assert part in message
    assert verdict in message
    assert ("no peer access" in message) is (verdict != "")


# The native side, as far as it goes without a GPU


def test_sizes_on_a_gpu_can_be_told_without_one() -> None:
    gpu = _native.cuda_memory(0)
    assert _native.mapped_bytes(gpu, 1) == gpu.granularity == 2 << 20
    assert _native.mapped_bytes(gpu, (2 << 20) + 1) == 4 << 20


def output_of(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_memory_of_a_gpu_that_is_not_there_is_a_platform_error() -> None:
    program = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import torch
from moe_ep import MoEEpPlatformError
from moe_ep.collectives import SingleRankComm
from moe_ep.symmetric_memory import SymmetricMemory
try:
    SymmetricMemory.allocate(SingleRankComm(), 10, torch.device("cuda", 0))
except MoEEpPlatformError as error:
    print(error)
"""
    message = output_of(program)
    assert message.startswith("reserving shared memory failed: rank 0: ")
    wordings = (
        "no CUDA driver",
        "cuInit failed: CUDA_ERROR_NO_DEVICE",
        "built without CUDA",
    )
    assert any(wording in message for wording in wordings), message


def test_import_and_sizes_load_no_driver() -> None:
    program = """
from pathlib import Path
import torch
def loaded():
    maps = Path("/proc/self/maps").read_text()
    return [library for library in ("libcuda.so", "libnvidia-ml.so") if library in maps]
before = loaded()
import moe_ep.symmetric_memory
from moe_ep import _native
_native.mapped_bytes(_native.cuda_memory(0), 1)
assert loaded() == before, loaded()
print(torch.cuda.is_initialized())
"""
    assert output_of(program) == "False"


def test_unknown_gpu_is_in_no_domain() -> None:
    assert _native.gpu_fabric("GPU-00000000-0000-0000-0000-000000000000") is None


def test_fabric_handle_is_64_bytes() -> None:
    handle = _native.ShareableHandle(bytes(range(64)), 4096)
    assert (handle.fabric, handle.bytes, handle.descriptor) == (bytes(range(64)), 4096, -1)
    with pytest.raises(ValueError, match="must have 64 bytes, got 63"):
        _native.ShareableHandle(bytes(63), 4096)


def test_fabric_handle_goes_through_no_socket_and_into_no_cpu_memory() -> None:
    page = _native.host_memory().granularity
    handle = _native.ShareableHandle(bytes(64), page)
    channel = _native.FdChannel(0, bytes(16))
    with pytest.raises(ValueError, match="file descriptors, got a FABRIC handle"):
        channel.send(channel.name, 0, handle, 1)
    memory = _native.SegmentedMemory(_native.host_memory(), 0, 2, page)
    with pytest.raises(ValueError, match="file descriptors, got a FABRIC handle"):
        memory.back_own_segment(FABRIC)
    assert memory.state == "released"
    memory.back_own_segment(FD)
    with pytest.raises(ValueError, match="file descriptors, got a FABRIC handle"):
        memory.map_peer_segment(1, handle)
    assert memory.state == "joining"
