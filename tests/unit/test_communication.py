"""Does the base class keep every backend in the right state, whatever its hooks raise?"""

import contextlib
import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch

import moe_ep
from moe_ep import BootstrapConfig, MoEEpCommParams, TorchDistAlltoAll
from moe_ep.errors import error_of_op

PARAMS = MoEEpCommParams(4, 2, 8, 16)
X = torch.ones(3, 16, dtype=torch.bfloat16)
IDS = torch.tensor([[0, 1]] * 3)


class Scripted(TorchDistAlltoAll):
    """A backend whose next hook raises `failure`, once."""

    failure: Exception | None = None
    destroyed = 0

    def _fail(self):
        failure, self.failure = self.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # else its own traceback holds it

    def _dispatch(self, *args, **kwargs):
        self._fail()
        return super()._dispatch(*args, **kwargs)

    def _combine(self, *args, **kwargs):
        self._fail()
        return super()._combine(*args, **kwargs)

    def _check(self):
        self._fail()
        super()._check()

    def _destroy(self):
        self.destroyed += 1
        self._fail()


@pytest.fixture
def comm():
    return Scripted(BootstrapConfig(1, 0, device="cpu"), PARAMS)


def dispatch(comm):
    return comm.dispatch(X, IDS)


def play_round(comm):
    assert torch.equal(comm.combine(dispatch(comm).hidden_states), X)


def test_it_says_what_it_is(comm):
    assert (comm.ep_rank, comm.ep_size) == (0, 1)
    assert (comm.first_local_expert, comm.num_local_experts) == (0, 4)
    assert (comm.backend_name, comm.workspace_bytes) == ("torch_dist", 0)
    assert (comm.supports_cuda_graph, comm.supports_torch_compile) == (True, True)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("backend", ["cake", "nvlink_one_sided", "nvlink_two_sided", "torch_dist"])
def test_it_cannot_be_copied_or_pickled(backend, duplicate):
    with moe_ep.create_communication(BootstrapConfig(1, 0, device="cpu"), PARAMS, backend) as one:
        name = type(one).__name__
        with pytest.raises(TypeError, match=rf"^{name} cannot be copied or pickled: .*group"):
            duplicate(one)
        play_round(one)


def test_the_result_is_frozen(comm):
    with pytest.raises(dataclasses.FrozenInstanceError):
        dispatch(comm).tokens_per_rank = 1


def test_combine_before_dispatch(comm):
    with pytest.raises(moe_ep.MoEEpStateError, match="combine without an open round"):
        comm.combine(torch.zeros(8, 16))
    play_round(comm)


def test_dispatch_twice(comm):
    result = dispatch(comm)
    with pytest.raises(moe_ep.MoEEpStateError, match="dispatch while a round is open"):
        dispatch(comm)
    comm.combine(result.hidden_states)
    play_round(comm)


def test_a_result_used_twice(comm):
    result = dispatch(comm)
    comm.combine(result.hidden_states)
    with pytest.raises(moe_ep.MoEEpStateError, match="combine without an open round"):
        comm.combine(result.hidden_states)


def test_the_combine_input_buffer_belongs_to_an_open_round(comm):
    with pytest.raises(moe_ep.MoEEpStateError, match="get_combine_input_buffer without"):
        comm.get_combine_input_buffer(torch.bfloat16)
    dispatch(comm)
    assert comm.get_combine_input_buffer(torch.bfloat16) is None
    with pytest.raises(TypeError, match=r"dtype must be torch\.bfloat16"):
        comm.get_combine_input_buffer(torch.float32)


def test_destroy_is_idempotent_and_final(comm):
    comm.destroy()
    comm.destroy()
    assert comm.destroyed == 1
    for call in (dispatch, Scripted.check, Scripted.__enter__):
        with pytest.raises(moe_ep.MoEEpStateError, match="after destroy"):
            call(comm)


@pytest.mark.parametrize("backend", ["cake", "nvlink_one_sided", "nvlink_two_sided", "torch_dist"])
def test_what_it_says_of_itself_can_be_read_after_destroy_too(backend):
    made = moe_ep.create_communication(BootstrapConfig(1, 0, device="cpu"), PARAMS, backend)
    names = [
        name for name in dir(made) if not name.startswith("_") and not callable(getattr(made, name))
    ]
    assert {"workspace_bytes", "ep_rank", "num_local_experts", "device"} <= set(names)
    before = {name: getattr(made, name) for name in names}
    made.destroy()
    after = {name: getattr(made, name) for name in names}
    assert after == {**before, "workspace_bytes": 0}
    assert "state='destroyed'" in repr(made)


def test_destroy_is_final_even_if_it_fails(comm):
    comm.failure = RuntimeError("stuck")
    with pytest.raises(RuntimeError, match="stuck"):
        comm.destroy()
    comm.destroy()
    assert comm.destroyed == 1


def test_the_context_manager_destroys_also_in_an_open_round(comm):
    with comm as entered:
        assert entered is comm
        dispatch(comm)
    assert comm.destroyed == 1


@pytest.mark.parametrize(
    "failure",
    [
        moe_ep.MoEEpTimeoutError("rank 0 waited"),
        error_of_op("MoEEpTimeoutError: rank 0 waited"),
        RuntimeError("a bug"),
        KeyError("a bug"),
        TypeError("a bug"),
    ],
)
@pytest.mark.parametrize("in_combine", [False, True])
def test_a_timeout_or_an_unknown_error_breaks_the_object(comm, failure, in_combine):
    result = dispatch(comm) if in_combine else None
    comm.failure = failure
    wanted = moe_ep.MoEEpTimeoutError if "waited" in str(failure) else type(failure)
    call = Scripted.combine if in_combine else Scripted.dispatch
    arguments = [result.hidden_states] if in_combine else [X, IDS]
    with pytest.raises(wanted, match=r"waited|a bug"):
        call(comm, *arguments)
    for later in (dispatch, Scripted.check):
        with pytest.raises(moe_ep.MoEEpStateError, match=r"re-create.*because.*(waited|a bug)"):
            later(comm)
    comm.destroy()


class Held:
    """Stands for what a caller's frame holds, such as a CUDA graph."""


@pytest.mark.parametrize("words", ["MoEEpConfigError: 4 and 8", "MoEEpTimeoutError: waited", "bug"])
def test_an_error_that_is_dropped_holds_nothing_of_its_callers(comm, words):
    def fails():
        held = Held()
        comm.failure = error_of_op(words) or RuntimeError(words)
        with contextlib.suppress(moe_ep.MoEEpError, RuntimeError):
            dispatch(comm)
        return weakref.ref(held)

    gc.disable()
    try:
        assert fails()() is None
    finally:
        gc.enable()


def test_an_error_of_an_op_that_is_dropped_holds_nothing_of_its_callers():
    def fails():
        held = Held()
        with contextlib.suppress(moe_ep.MoEEpConfigError):
            torch.ops.moe_ep.cake_check(torch.zeros(1, 64, dtype=torch.uint8), [], 0)
        return weakref.ref(held)

    gc.disable()
    try:
        assert fails()() is None
    finally:
        gc.enable()


def test_an_interrupt_breaks_the_object(comm):
    comm.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        dispatch(comm)
    with pytest.raises(moe_ep.MoEEpStateError, match="or runs in another thread"):
        dispatch(comm)


def test_what_broke_the_object_is_named_where_it_says_nothing(comm):
    comm.failure = AssertionError()
    with pytest.raises(AssertionError):
        dispatch(comm)
    with pytest.raises(moe_ep.MoEEpStateError, match=r"It broke because: AssertionError$"):
        dispatch(comm)


@pytest.mark.parametrize("as_op", [False, True])
def test_ranks_that_disagree_can_go_on(comm, as_op):
    comm.failure = (
        error_of_op("TypeError: 4 and 8") if as_op else moe_ep.MoEEpConfigError("4 and 8")
    )
    with pytest.raises(TypeError if as_op else moe_ep.MoEEpConfigError, match="4 and 8") as raised:
        dispatch(comm)
    assert raised.value.__suppress_context__
    play_round(comm)


def test_an_op_that_refuses_combine_leaves_the_round_open(comm):
    result = dispatch(comm)
    comm.failure = error_of_op("MoEEpStateError: a clone of the workspace")
    with pytest.raises(moe_ep.MoEEpStateError, match="a clone"):
        comm.combine(result.hidden_states)
    comm.combine(result.hidden_states)


def test_a_wrong_id_is_raised_after_combine_which_closes_the_round(comm):
    output = torch.empty_like(X)
    result = comm.dispatch(X, torch.tensor([[0, 1], [4, 1], [-7, 99]]))
    match = r"rank 0 passed 2 expert id\(s\) outside \[0, 4\).*token 1, slot 0: 4"
    with pytest.raises(moe_ep.MoEEpInputError, match=match):
        comm.combine(result.hidden_states, output=output)
    assert torch.equal(output, torch.tensor([[1.0], [1.0], [0.0]]).expand(3, 16).bfloat16())
    comm.check()
    play_round(comm)


def test_a_wrong_id_is_raised_by_check_and_then_not_again(comm):
    result = comm.dispatch(X, torch.tensor([[0, 1], [4, 1], [2, 3]]))
    with pytest.raises(moe_ep.MoEEpInputError, match="slot 0: 4"):
        comm.check()
    comm.check()
    assert torch.equal(comm.combine(result.hidden_states), X)


def test_check_raises_a_recorded_timeout_and_breaks_the_object(comm):
    comm.failure = error_of_op("MoEEpTimeoutError: rank 0 waited")
    with pytest.raises(moe_ep.MoEEpTimeoutError):
        comm.check()
    with pytest.raises(moe_ep.MoEEpStateError, match="broken"):
        comm.check()


@pytest.mark.parametrize("call", ["checkpoint_prepare", "checkpoint_restore", "reinitialize"])
def test_what_the_host_must_wait_for_is_refused_in_a_capture(comm, call, monkeypatch):
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(comm, "device", torch.device("cuda", 0))
        on_a_gpu.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        on_a_gpu.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(moe_ep.MoEEpStateError, match=rf"^{call} while a CUDA graph .*after"):
            getattr(comm, call)()
    play_round(comm)
