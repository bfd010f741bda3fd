"""Does a name, a config or "auto" become the communication that it stands for?"""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import moe_ep
from moe_ep import BootstrapConfig, MoEEpCommParams, TorchDistAlltoAll, TorchDistConfig, registry

PARAMS = MoEEpCommParams(4, 2, 8, 16)
ALONE = BootstrapConfig(1, 0, device="cpu")


@dataclass(frozen=True, kw_only=True)
class OurConfig(moe_ep.CommunicationConfig):
    backend_name: ClassVar[str] = "ours"
    speed: int = 1


class OurCommunication(TorchDistAlltoAll):
    """A third party's backend: torch_dist under another name and config."""

    config_type = OurConfig

    def __init__(self, bootstrap, params, config):
        moe_ep.MoEEpCommunication.__init__(self, bootstrap, params, config)


@pytest.fixture
def empty_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registry", {})


@pytest.fixture
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


def test_all_backends_are_registered_and_cake_is_preferred():
    assert moe_ep.available_communication_backends() == (
        "cake",
        "nvlink_one_sided",
        "nvlink_two_sided",
        "torch_dist",
    )


@pytest.mark.parametrize("backend", ["torch_dist", TorchDistConfig(timeout_sec=7)])
def test_a_name_or_a_config_creates_the_communication(backend):
    options = {"timeout_sec": 7} if isinstance(backend, str) else {}
    made = moe_ep.create_communication(ALONE, PARAMS, backend, **options)
    assert type(made) is TorchDistAlltoAll
    assert (made.backend_name, made.config.timeout_sec) == ("torch_dist", 7)


def test_an_unknown_name_lists_the_known_ones():
    names = "cake, nvlink_one_sided, nvlink_two_sided, torch_dist"
    with pytest.raises(KeyError, match=rf"nvlink.*registered are: {names}"):
        moe_ep.create_communication(ALONE, PARAMS, "nvlink")


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(TypeError, match=r"no option lamport.*timeout_sec"):
        moe_ep.create_communication(ALONE, PARAMS, "torch_dist", lamport=True)


@pytest.mark.parametrize("options", [{"fifos": 3}, {"fifos": 3, "timeout_sec": 3}])
def test_an_option_that_no_backend_has_is_the_callers_fault_with_auto_too(options):
    with pytest.raises(TypeError, match="no option fifos; it has: ") as raised:
        moe_ep.create_communication(ALONE, PARAMS, "auto", **options)
    for config in (
        moe_ep.CakeAlltoAllConfig,
        moe_ep.NVLinkOneSidedConfig,
        moe_ep.NVLinkTwoSidedConfig,
        TorchDistConfig,
    ):
        with pytest.raises(TypeError) as named:
            moe_ep.create_communication(ALONE, PARAMS, config.backend_name, **options)
        assert str(named.value) in str(raised.value)


def test_options_that_no_backend_has_together_are_the_callers_fault(own_registry):
    moe_ep.register_communication("ours")(OurCommunication)
    with pytest.raises(TypeError, match=r"'cake' has no option speed; .*'ours' has no option en"):
        moe_ep.create_communication(ALONE, PARAMS, "auto", speed=2, enable_rank_mask=True)


def test_options_beside_a_config_are_refused():
    with pytest.raises(TypeError, match="options must not be given with a TorchDistConfig"):
        moe_ep.create_communication(ALONE, PARAMS, TorchDistConfig(), timeout_sec=3)


@pytest.mark.parametrize("timeout", [0, -1, 86401])
def test_a_timeout_outside_its_limits_is_refused(timeout):
    with pytest.raises(ValueError, match=rf"timeout_sec must be 1..86400, got {timeout}"):
        TorchDistConfig(timeout_sec=timeout)


@pytest.mark.parametrize("timeout", [1.5, "3", True])
def test_a_timeout_of_another_type_is_refused(timeout):
    with pytest.raises(TypeError, match="timeout_sec must be an int"):
        TorchDistConfig(timeout_sec=timeout)


def test_a_comm_backend_without_collectives_is_refused():
    with pytest.raises(TypeError, match="get_rank, get_size, allgather and barrier"):
        TorchDistConfig(comm_backend=object())


def test_more_statistics_than_experts_are_refused():
    with pytest.raises(ValueError, match=r"eplb_stats_num_experts must be 0..4, got 5"):
        moe_ep.create_communication(ALONE, PARAMS, "torch_dist", eplb_stats_num_experts=5)


@pytest.mark.parametrize(
    "backend", ["torch_dist", TorchDistConfig(), TorchDistConfig, TorchDistAlltoAll]
)
def test_whatever_names_a_backend_has_its_name(backend):
    assert moe_ep.communication_backend_name(backend) == "torch_dist"
    assert moe_ep.is_communication_backend(backend)


@pytest.mark.parametrize("backend", ["auto", "nccl", "", None, 3, object(), torch.device("cpu")])
def test_nothing_else_is_a_backend(backend):
    assert not moe_ep.is_communication_backend(backend)
    with pytest.raises((KeyError, TypeError)):
        moe_ep.communication_backend_name(backend)


def test_is_communication_backend_never_raises():
    class Hostile:
        @property
        def backend_name(self):
            raise RuntimeError

    assert not moe_ep.is_communication_backend(Hostile())


def test_a_third_party_can_register_a_backend(own_registry):
    assert moe_ep.register_communication("ours")(OurCommunication) is OurCommunication
    made = moe_ep.create_communication(ALONE, PARAMS, "ours", speed=2)
    assert (type(made), made.backend_name, made.config.speed) == (OurCommunication, "ours", 2)
    assert moe_ep.available_communication_backends() == (
        "cake",
        "nvlink_one_sided",
        "nvlink_two_sided",
        "ours",
        "torch_dist",
    )


def test_registering_again_is_legal_and_taking_a_name_is_not(own_registry):
    moe_ep.register_communication("ours")(OurCommunication)
    moe_ep.register_communication("ours")(OurCommunication)

    class Another(OurCommunication):
        pass

    with pytest.raises(moe_ep.MoEEpConfigError, match="'ours' is taken by OurCommunication"):
        moe_ep.register_communication("ours")(Another)


@pytest.mark.parametrize("name", ["auto", "theirs"])
def test_a_name_that_is_not_the_config_s_is_refused(own_registry, name):
    with pytest.raises(moe_ep.MoEEpConfigError, match="name"):
        moe_ep.register_communication(name)(OurCommunication)


@pytest.mark.parametrize("wrong", [object, TorchDistConfig, "ours"])
def test_only_communications_are_registered(own_registry, wrong):
    with pytest.raises(TypeError, match="must be a subclass of MoEEpCommunication, got"):
        moe_ep.register_communication("ours")(wrong)


def test_the_estimate_names_its_wrong_arguments():
    config = TorchDistConfig()
    with pytest.raises(TypeError, match="params must be a MoEEpCommParams, got TorchDistConfig"):
        moe_ep.estimate_workspace_bytes(config, 1, config)
    with pytest.raises(TypeError, match="config must be a CommunicationConfig, got str"):
        moe_ep.estimate_workspace_bytes(PARAMS, 1, "torch_dist")


def test_auto_takes_the_most_preferred_backend():
    assert moe_ep.create_communication(ALONE, PARAMS, "auto").backend_name == "cake"


def test_auto_skips_a_backend_that_lacks_an_option(own_registry):
    moe_ep.register_communication("ours", preference=99)(OurCommunication)
    assert moe_ep.create_communication(ALONE, PARAMS, "auto").backend_name == "ours"
    made = moe_ep.create_communication(ALONE, PARAMS, "auto", eplb_stats_num_experts=1)
    assert made.backend_name == "cake"


def test_auto_skips_a_backend_that_cannot_run_and_says_why_if_none_can(empty_registry, monkeypatch):
    moe_ep.register_communication("ours")(OurCommunication)
    reason = classmethod(lambda cls, device=None: f"no luck on {device}")
    monkeypatch.setattr(OurCommunication, "unsupported_reason", reason)
    with pytest.raises(moe_ep.MoEEpPlatformError, match="ours: rank 0: no luck on cpu"):
        moe_ep.create_communication(ALONE, PARAMS, "auto")
    with pytest.raises(moe_ep.MoEEpPlatformError, match=r"ours cannot run.*no luck on cpu"):
        moe_ep.create_communication(ALONE, PARAMS, "ours")
    assert not OurCommunication.is_platform_supported()


@pytest.mark.parametrize("backend", ["cake", "nvlink_one_sided", "nvlink_two_sided", "torch_dist"])
def test_the_estimate_is_what_the_object_holds(backend):
    with moe_ep.create_communication(ALONE, PARAMS, backend) as made:
        estimate = moe_ep.estimate_workspace_bytes(PARAMS, 1, made.config)
        assert made.workspace_bytes == estimate
