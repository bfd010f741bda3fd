"""Do backends tell devices that this build has no code for?"""

from __future__ import annotations

import pytest
import torch

from moe_ep import available_communication_backends, cuda_support, ops, registry

needs_kernels = pytest.mark.skipif(
    not ops.has_cuda_kernels(), reason="this build of moe_ep has no CUDA kernels"
)


class Machine:
    """With one CUDA device, cuda:0, of some compute capability, and a build that has some code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capability = (9, 0)
        self.code: tuple[int, int] | None = (9, 0)
        monkeypatch.setattr(ops, "has_cuda_kernels", lambda: True)
        monkeypatch.setattr(ops, "code_capability", lambda capability: self.code)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)

    def reason(self, min_capability: tuple[int, int]) -> str | None:
        return cuda_support.reason_against("ours", min_capability, torch.device("cuda", 0))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_device_with_its_own_code_will_do(machine: Machine) -> None:
    assert machine.reason((9, 0)) is None
    assert machine.reason((8, 0)) is None


def test_a_device_that_is_too_old_will_not_do(machine: Machine) -> None:
    machine.capability = machine.code = (8, 9)
    assert machine.reason((8, 0)) is None
    assert machine.reason((9, 0)) == "ours needs compute capability 9.0 or newer, cuda:0 has 8.9"


def test_older_code_will_do_for_those_that_need_no_newer(machine: Machine) -> None:
    machine.code = (8, 0)
    assert machine.reason((8, 0)) is None
    assert machine.reason((9, 0)) == (
        "ours needs code for compute capability 9.0 or newer, and this build of moe_ep has only "
        "code for 8.0 for cuda:0, which has 9.0: build it with TORCH_CUDA_ARCH_LIST=9.0"
    )


def test_a_device_without_code_will_not_do(machine: Machine) -> None:
    machine.code = None
    reason = machine.reason((8, 0))
    assert reason is not None
    assert "this build of moe_ep has no code for cuda:0" in reason


@needs_kernels
def test_the_library_knows_what_code_a_device_runs() -> None:
    assert ops.code_capability((7, 5)) is None
    newest = ops.code_capability((99, 9))
    assert newest is not None
    assert newest >= (8, 0)
    assert ops.code_capability(newest) == newest
    major, minor = newest
    older = ops.code_capability((major, minor - 1) if minor else (major - 1, 9))
    assert older is None or older < newest


@pytest.mark.parametrize("backend", available_communication_backends())
def test_a_backend_cannot_run_where_there_is_no_device(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    communication = registry._registry[backend].communication
    assert communication.is_platform_supported()
    assert not communication.is_platform_supported(torch.device("cuda", 0))
    with pytest.raises(TypeError, match=r"device must be a torch.device, got str"):
        communication.unsupported_reason("cuda:0")  # type: ignore[arg-type]
