"""Do all ranks raise together when the arguments of one of them are wrong?

The ranks are threads. None of these constructions gets as far as to need a process group.
"""

import dataclasses
import threading

import pytest

import moe_ep
from moe_ep import (
    BootstrapConfig,
    CakeAlltoAll,
    MoEEpCommParams,
    NVLinkOneSidedAlltoAll,
    NVLinkTwoSidedAlltoAll,
    TorchDistAlltoAll,
    construction,
)
from moe_ep.construction import HostIdentity
from tests.unit.test_collectives import ThreadComm

PARAMS = MoEEpCommParams(4, 2, 8, 16)
GOOD = {"params": PARAMS, "backend": "cake"}


def create_on_threads(*arguments):
    """Return what create_communication raised on each rank; it must not succeed on any.

    arguments: for each rank its own, or a function that makes them from the rank's comm.
    """
    arguments = [
        given if callable(given) else lambda comm, given=given: {"comm_backend": comm, **given}
        for given in arguments
    ]
    objects, barrier = [None] * len(arguments), threading.Barrier(len(arguments))
    raised = [None] * len(arguments)

    def create(rank):
        comm = ThreadComm(rank, objects, barrier)
        bootstrap = BootstrapConfig(len(arguments), rank, device="cpu")
        try:
            moe_ep.create_communication(bootstrap, **{**GOOD, **arguments[rank](comm)})
        except Exception as exc:
            raised[rank] = exc

    threads = [
        threading.Thread(target=create, args=(rank,), name=f"rank {rank}")
        for rank in range(len(arguments))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return raised


def expect_on_all(raised, error, *parts):
    for exc in raised:
        assert type(exc) is error, repr(exc)
        assert str(exc) == str(raised[0])
        for part in parts:
            assert part in str(exc), part


@pytest.mark.parametrize("backend", ["cake", "nvlink_one_sided", "torch_dist"])
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"eplb_stats_num_experts": 5}, "eplb_stats_num_experts must be"),
        ({"eplb_stats_num_experts": -1}, "0..2147483647, got -1"),
    ],
)
def test_wrong_statistics_on_one_rank_raise_on_all(backend, wrong, reason):
    raised = create_on_threads({"backend": backend}, {"backend": backend, **wrong})
    what = "creating the communication failed: rank 0: fine; rank 1: "
    expect_on_all(raised, moe_ep.MoEEpConfigError, what, reason)


@pytest.mark.parametrize("backend", ["cake", "nvlink_one_sided", "nvlink_two_sided", "torch_dist"])
@pytest.mark.parametrize(
    ("wrong", "error", "reason"),
    [
        ({"timeout_sec": 0}, moe_ep.MoEEpConfigError, "timeout_sec must be 1..86400, got 0"),
        ({"timeout_sec": "3"}, TypeError, "timeout_sec must be an int"),
        ({"speed": 3}, TypeError, "has no option speed"),
        ({"backend": "nvlink"}, KeyError, "unknown backend 'nvlink'"),
        ({"backend": None}, TypeError, "backend must be a name"),
        ({"params": {}}, TypeError, "params must be a MoEEpCommParams, got dict"),
    ],
)
def test_a_wrong_argument_on_one_rank_raises_on_all(backend, wrong, error, reason):
    raised = create_on_threads({"backend": backend}, {"backend": backend, **wrong})
    expect_on_all(raised, error, "creating the communication failed: rank 0: fine; rank 1: ")
    assert reason in raised[0].args[0]


def test_every_rank_s_reason_is_told():
    raised = create_on_threads({"eplb_stats_num_experts": 5}, {}, {"eplb_stats_num_experts": 6})
    expect_on_all(raised, moe_ep.MoEEpConfigError, "rank 0: eplb", "rank 1: fine", "rank 2: eplb")


def test_options_beside_a_config_on_one_rank_raise_on_all():
    def config(comm):
        return moe_ep.CakeAlltoAllConfig(comm_backend=comm)

    raised = create_on_threads(
        lambda comm: {"backend": config(comm)},
        lambda comm: {"backend": config(comm), "timeout_sec": 3},
    )
    expect_on_all(raised, TypeError, "rank 1: options must not be given with a CakeAlltoAllConfig")


@pytest.mark.parametrize("timeout", [0, "3"])
def test_a_wrong_timeout_on_one_rank_stops_the_choice_on_all(timeout):
    raised = create_on_threads({"backend": "auto"}, {"backend": "auto", "timeout_sec": timeout})
    error = TypeError if timeout == "3" else moe_ep.MoEEpConfigError
    expect_on_all(raised, error, "choosing a backend failed: rank 0: fine; rank 1: timeout_sec")


def test_an_option_that_no_backend_has_on_one_rank_stops_the_choice_on_all():
    raised = create_on_threads({"backend": "auto"}, {"backend": "auto", "speed": 3})
    parts = ["choosing a backend failed: rank 0: fine; rank 1: ", "has no option speed; it has: "]
    expect_on_all(raised, TypeError, *parts)


def test_a_wrong_setting_on_one_rank_raises_on_all_after_the_choice():
    raised = create_on_threads(
        {"backend": "auto"}, {"backend": "auto", "eplb_stats_num_experts": 5}
    )
    expect_on_all(raised, moe_ep.MoEEpConfigError, "rank 1: eplb_stats_num_experts must be 0..4")


def test_a_choice_on_one_rank_only_raises_on_all():
    raised = create_on_threads({"backend": "auto"}, {}, {})
    parts = ["rank 0: choosing a backend", "ranks 1, 2: creating the communication"]
    expect_on_all(raised, moe_ep.MoEEpConfigError, *parts)


@pytest.mark.parametrize("backend", ["auto", "cake"])
def test_a_backend_that_cannot_tell_whether_it_runs_is_one_that_does_not(backend, monkeypatch):
    def reason(cls, device=None):
        if threading.current_thread().name == "rank 1":
            raise OSError("no driver")

    for cls in (CakeAlltoAll, NVLinkOneSidedAlltoAll, NVLinkTwoSidedAlltoAll, TorchDistAlltoAll):
        monkeypatch.setattr(cls, "unsupported_reason", classmethod(reason))
    raised = create_on_threads({"backend": backend}, {"backend": backend})
    expect_on_all(raised, moe_ep.MoEEpPlatformError, "rank 0: fine; rank 1: OSError: no driver")


@pytest.mark.parametrize("backend", ["auto", "cake"])
def test_a_missing_bootstrap_is_named(backend):
    with pytest.raises(TypeError, match="bootstrap must be a BootstrapConfig, got NoneType"):
        moe_ep.create_communication(None, PARAMS, backend)


def test_alone_the_error_is_the_argument_s_own():
    alone = BootstrapConfig(1, 0, device="cpu")
    with pytest.raises(moe_ep.MoEEpConfigError, match=r"^eplb_stats_num_experts must be 0\.\.4"):
        moe_ep.create_communication(alone, PARAMS, "cake", eplb_stats_num_experts=5)


def test_a_rank_that_has_no_group_raises_its_own_error(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(KeyError, match="unknown backend 'nvlink'"):
        moe_ep.create_communication(BootstrapConfig(2, 0, device="cpu"), PARAMS, "nvlink")


def test_containers_of_one_kernel_are_one_host():
    assert HostIdentity("a", "boot 1") == HostIdentity("b", "boot 1")
    assert HostIdentity("a", "boot 1") != HostIdentity("a", "boot 2")
    assert HostIdentity("a", "boot 1", "net 1") != HostIdentity("a", "boot 1", "net 2")
    assert str(HostIdentity("a", "boot 1")) == "a (boot id boot 1)"
    assert str(HostIdentity("a", "boot 1", "net:[1]")) == "a (boot id boot 1, net:[1])"


@pytest.mark.parametrize("stranger", ["boot_id", "network"])
def test_auto_does_not_choose_cake_where_memory_cannot_be_shared(stranger, monkeypatch):
    here = HostIdentity.of_this_process()

    def somewhere():
        there = threading.current_thread().name == "rank 1"
        return dataclasses.replace(here, **{stranger: "elsewhere"}) if there else here

    monkeypatch.setattr(HostIdentity, "of_this_process", somewhere)
    # An option that torch_dist lacks, so that nothing is left.
    raised = create_on_threads(*[{"backend": "auto", "enable_rank_mask": True}] * 2)
    parts = ["cake: it needs all ranks on one host", "elsewhere", "torch_dist: ranks 0, 1: it has"]
    expect_on_all(raised, moe_ep.MoEEpPlatformError, *parts)


def test_a_kernel_without_a_boot_id_is_known_by_its_host_name(monkeypatch):
    here = HostIdentity.of_this_process()
    assert here.boot_id not in ("", here.name)
    monkeypatch.setattr(construction, "_BOOT_ID", construction._BOOT_ID / "nowhere")
    wanted = dataclasses.replace(here, boot_id=here.name)
    assert HostIdentity.of_this_process() == wanted
