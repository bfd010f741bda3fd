"""Does a BootstrapConfig describe its group, whichever launcher started the process?"""

import dataclasses
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe_ep import BootstrapConfig, MoEEpConfigError
from moe_ep.launchers import LaunchedProcess, detect_launch

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}
SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
PMIX = {"PMIX_RANK": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}


@pytest.fixture
def no_launcher(monkeypatch):
    for environment in (TORCHRUN, OPEN_MPI, HYDRA, SLURM, PMIX):
        for name in environment:
            monkeypatch.delenv(name, raising=False)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def group_of_one(no_launcher):
    if dist.is_initialized():
        pytest.skip("this process is part of a distributed run")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Communicator:
    """A comm_backend of the given rank and size that is never asked to communicate."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def get_rank(self):
        return self.rank

    def get_size(self):
        return self.size

    def allgather(self, obj):
        raise AssertionError

    def barrier(self):
        raise AssertionError


def test_fields_have_the_contract_s_positional_order():
    names = [field.name for field in dataclasses.fields(BootstrapConfig)]
    assert names == [
        "world_size",
        "rank",
        "stream",
        "auto_bootstrap",
        "nccl_comm",
        "process_group",
        "tcp_store",
        "device",
    ]
    with pytest.raises(TypeError):
        BootstrapConfig(1, 0, 0, True, None, None, None, "cpu")


@pytest.mark.parametrize("size", [0, -1])
def test_world_size_is_positive(size):
    with pytest.raises(MoEEpConfigError, match=f"world_size must be at least 1, got {size}"):
        BootstrapConfig(size, 0, device="cpu")


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_is_inside_the_group(rank):
    with pytest.raises(MoEEpConfigError, match=rf"rank must be 0..1 .*got {rank}"):
        BootstrapConfig(2, rank, device="cpu")


def test_rank_is_an_int():
    with pytest.raises(TypeError, match="rank must be an int, got '0'"):
        BootstrapConfig(2, "0", device="cpu")


def test_nccl_comm_is_refused_and_process_group_named():
    with pytest.raises(MoEEpConfigError, match=r"nccl_comm must be None.*process_group"):
        BootstrapConfig(1, 0, nccl_comm=object(), device="cpu")


def test_a_stream_on_the_cpu_is_refused():
    with pytest.raises(MoEEpConfigError, match="stream must be 0 on cpu"):
        BootstrapConfig(1, 0, stream=7, device="cpu")


def test_process_group_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"process_group must be a torch\.distributed ProcessGroup"):
        BootstrapConfig(1, 0, process_group="world", device="cpu")


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_a_cpu_device_is_resolved(device):
    assert BootstrapConfig(1, 0, device=device).torch_device == torch.device("cpu")


@pytest.mark.parametrize("device", ["meta", torch.device("mps")])
def test_other_kinds_of_device_are_refused(device):
    with pytest.raises(MoEEpConfigError, match="device must be a CPU or CUDA device"):
        BootstrapConfig(1, 0, device=device)


def test_a_device_that_torch_does_not_know_is_refused():
    with pytest.raises(MoEEpConfigError, match="device must be a CPU or CUDA device, got 'gpu:0'"):
        BootstrapConfig(1, 0, device="gpu:0")


def test_a_store_of_another_kind_is_refused():
    with pytest.raises(
        TypeError, match=r"tcp_store must be a torch.distributed Store, got 'localhost"
    ):
        BootstrapConfig(1, 0, tcp_store="localhost:29500", device="cpu")


def test_auto_bootstrap_is_a_bool():
    with pytest.raises(TypeError, match="auto_bootstrap must be a bool, got 'no'"):
        BootstrapConfig(1, 0, auto_bootstrap="no", device="cpu")


def test_a_mesh_of_another_kind_is_refused(no_launcher):
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got ProcessGroup"):
        BootstrapConfig.from_device_mesh(dist.ProcessGroup(0, 1))


@pytest.mark.parametrize("device", [True, 1.0])
def test_device_of_another_type_is_refused(device):
    with pytest.raises(TypeError, match="device must be an int, str"):
        BootstrapConfig(1, 0, device=device)


def test_a_cuda_ordinal_without_such_a_gpu_is_refused():
    count = torch.cuda.device_count()
    with pytest.raises(MoEEpConfigError, match=rf"cuda:{count}, but torch sees {count} CUDA"):
        BootstrapConfig(1, 0, device=count)


def test_the_default_device_follows_the_local_rank(monkeypatch, no_launcher):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("RANK", "6")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert BootstrapConfig(2, 1).torch_device == torch.device("cuda", 2)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(MoEEpConfigError, match="LOCAL_RANK is 4, but torch sees 4"):
        BootstrapConfig(2, 1)


def test_a_local_rank_that_nobody_knows_must_be_given(monkeypatch, no_launcher):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(MoEEpConfigError, match="device must be given"):
        BootstrapConfig(2, 1)
    assert BootstrapConfig(1, 0).torch_device == torch.device("cuda", 0)


def test_without_cuda_the_default_device_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert BootstrapConfig(1, 0).torch_device == torch.device("cpu")


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (OPEN_MPI, "Open MPI"),
        (HYDRA, "MPICH/Hydra"),
        (SLURM, "Slurm"),
        (PMIX, "PMIx under Slurm"),
    ],
)
def test_from_env_understands_the_launcher(environment, launcher, monkeypatch, no_launcher):
    assert detect_launch(environment) == LaunchedProcess(launcher, rank=3, size=8, local_rank=1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = BootstrapConfig.from_env(device="cpu")
    assert (made.world_size, made.rank) == (8, 3)


def test_torchrun_comes_first():
    assert detect_launch({**OPEN_MPI, **TORCHRUN, "RANK": "5"}).rank == 5


def test_a_batch_script_of_slurm_is_no_rank():
    assert detect_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None


def test_from_env_without_a_launcher_says_what_to_do(no_launcher):
    with pytest.raises(MoEEpConfigError, match=r"no launcher found.*torchrun"):
        BootstrapConfig.from_env(device="cpu")


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ({"RANK": "3"}, "only RANK=3 without WORLD_SIZE:"),
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "1"}, "only WORLD_SIZE=8 without RANK:"),
        ({"SLURM_PROCID": "0"}, "only SLURM_PROCID=0 without SLURM_STEP_NUM_TASKS:"),
    ],
)
def test_half_of_a_launcher_s_variables_is_named(no_launcher, monkeypatch, there, message):
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MoEEpConfigError, match=message):
        BootstrapConfig.from_env(device="cpu")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "x"}, "RANK must be an integer, got 'x'"),
        ({"RANK": "8"}, "RANK=8 and WORLD_SIZE=8"),
        ({"WORLD_SIZE": "0"}, "RANK=3 and WORLD_SIZE=0"),
    ],
)
def test_inconsistent_variables_are_named(changed, message):
    with pytest.raises(MoEEpConfigError, match=message):
        detect_launch({**TORCHRUN, **changed})


def test_from_process_group_takes_size_and_rank_from_it(group_of_one):
    made = BootstrapConfig.from_process_group(group_of_one, device="cpu")
    assert (made.world_size, made.rank, made.group()) == (1, 0, group_of_one)
    assert BootstrapConfig.from_process_group(device="cpu").process_group is group_of_one


def test_from_process_group_without_torch_distributed():
    if dist.is_initialized():
        pytest.skip("this process is part of a distributed run")
    with pytest.raises(MoEEpConfigError, match="no default group"):
        BootstrapConfig.from_process_group()


def test_from_process_group_outside_the_group(group_of_one):
    with pytest.raises(MoEEpConfigError, match="contains this process"):
        BootstrapConfig.from_process_group(dist.GroupMember.NON_GROUP_MEMBER, device="cpu")


def test_from_device_mesh(group_of_one):
    mesh = DeviceMesh("cpu", [[0]], mesh_dim_names=("dp", "ep"))
    made = BootstrapConfig.from_device_mesh(mesh["ep"])
    assert (made.world_size, made.rank, made.torch_device.type) == (1, 0, "cpu")
    with pytest.raises(MoEEpConfigError, match=r"one dimension, got 2.*mesh\['ep'\]"):
        BootstrapConfig.from_device_mesh(mesh)


def test_a_process_group_of_another_size_is_refused(group_of_one):
    with pytest.raises(MoEEpConfigError, match="size 1 and rank 0, but world_size=2 and rank=1"):
        BootstrapConfig(2, 1, process_group=group_of_one, device="cpu")


def test_a_default_group_of_another_size_is_refused(group_of_one):
    with pytest.raises(MoEEpConfigError, match=r"default group has size 1 .*world_size=4"):
        BootstrapConfig(4, 0, device="cpu").group()


def test_no_group_without_auto_bootstrap(no_launcher):
    if dist.is_initialized():
        pytest.skip("this process is part of a distributed run")
    with pytest.raises(MoEEpConfigError, match="auto_bootstrap is False"):
        BootstrapConfig(2, 0, auto_bootstrap=False, device="cpu").group()


def test_auto_bootstrap_without_a_rendezvous_says_what_to_set(no_launcher):
    if dist.is_initialized():
        pytest.skip("this process is part of a distributed run")
    with pytest.raises(MoEEpConfigError, match="MASTER_ADDR and MASTER_PORT must be set"):
        BootstrapConfig(2, 0, device="cpu").group()


def test_auto_bootstrap_refuses_a_world_that_is_not_the_launcher_s(no_launcher, monkeypatch):
    if dist.is_initialized():
        pytest.skip("this process is part of a distributed run")
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MoEEpConfigError, match=r"launcher \(torchrun\) has size 8 and rank 3"):
        BootstrapConfig(2, 1, device="cpu").group()


@pytest.mark.parametrize("store", [None, "given"])
def test_auto_bootstrap_creates_the_default_group(no_launcher, store):
    if dist.is_initialized():
        pytest.skip("this process is part of a distributed run")
    tcp_store = dist.HashStore() if store else None
    try:
        group = BootstrapConfig(1, 0, tcp_store=tcp_store, device="cpu").group()
        assert (group.size(), group.rank(), dist.get_backend(group)) == (1, 0, "gloo")
    finally:
        dist.destroy_process_group()


def test_a_group_of_one_needs_no_process_group(no_launcher):
    comm = BootstrapConfig(1, 0, auto_bootstrap=False, device="cpu").comm()
    assert (comm.get_rank(), comm.get_size(), comm.allgather("x")) == (0, 1, ["x"])
    comm.barrier()


def test_a_comm_backend_of_the_group_s_size_and_rank_is_taken():
    given = Communicator(1, 4)
    assert BootstrapConfig(4, 1, device="cpu").comm(given) is given


@pytest.mark.parametrize(("rank", "size"), [(0, 4), (1, 3)])
def test_a_comm_backend_of_another_size_or_rank_is_refused(rank, size):
    with pytest.raises(MoEEpConfigError, match=f"comm_backend has size {size} and rank {rank}"):
        BootstrapConfig(4, 1, device="cpu").comm(Communicator(rank, size))


def test_the_import_touches_no_driver():
    code = "import torch, moe_ep; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)
