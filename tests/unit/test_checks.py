"""Is every wrong argument of dispatch and combine refused before anything is sent, and named?"""

import pytest
import torch

from moe_ep import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpConfigError,
    QuantFormat,
    TorchDistAlltoAll,
    TorchDistConfig,
)
from moe_ep.checks import check_combine, check_dispatch

ALONE = BootstrapConfig(1, 0, device="cpu")
CAPACITY, TOP_K, HIDDEN = 8, 2, 64


def tokens(n=3, dtype=torch.bfloat16, columns=HIDDEN):
    return torch.zeros(n, columns, dtype=dtype)


def ids(n=3, dtype=torch.int32, columns=TOP_K):
    return torch.zeros(n, columns, dtype=dtype)


def weights(n=3, dtype=torch.float32, columns=TOP_K):
    return torch.ones(n, columns, dtype=dtype)


def check(quant_format=None, extra=0, stats=0, **changes):
    """Run the check on three good rows with the given arguments changed."""
    params = MoEEpCommParams(4, TOP_K, CAPACITY, HIDDEN, dispatch_format=quant_format)
    given = {
        "hidden_states": tokens(),
        "topk_ids": ids(),
        "topk_weights": weights(),
        "hidden_states_scale": None,
        "runtime_max_tokens_per_rank": None,
        "eplb_local_stats": None,
    }
    return check_dispatch(
        params,
        params.row_format,
        device=torch.device("cpu"),
        ep_rank=0,
        extra_payload_bytes_per_token=extra,
        eplb_stats_num_experts=stats,
        **{**given, **changes},
    )


@pytest.fixture
def comm():
    """A communication of one rank, whose next valid round must work after every refusal."""
    params = MoEEpCommParams(4, TOP_K, CAPACITY, HIDDEN)
    with TorchDistAlltoAll(ALONE, params, TorchDistConfig(eplb_stats_num_experts=2)) as made:
        yield made
        result = made.dispatch(tokens(), ids(), weights())
        assert torch.equal(made.combine(result.hidden_states), tokens())


def test_the_capacity_of_the_round():
    assert check() == CAPACITY
    assert check(runtime_max_tokens_per_rank=3) == 3
    empty = {"hidden_states": tokens(0), "topk_ids": ids(0), "topk_weights": weights(0)}
    assert check(**empty, runtime_max_tokens_per_rank=0) == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_are_int32_or_int64(dtype):
    check(topk_ids=ids(dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.bool])
def test_ids_of_another_dtype_name_the_allowed_ones(dtype):
    with pytest.raises(TypeError, match=rf"topk_ids must be torch.int32 or torch.int64.*{dtype}"):
        check(topk_ids=ids(dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_another_dtype_say_how_to_convert(dtype):
    with pytest.raises(TypeError, match=rf"must be torch.float32, got {dtype}.*\.float\(\)"):
        check(topk_weights=weights(dtype=dtype))


def test_weights_may_be_absent():
    check(topk_weights=None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8])
def test_unquantised_rows_have_the_token_dtype(dtype):
    with pytest.raises(TypeError, match=rf"hidden_states must be torch.bfloat16, got {dtype}"):
        check(hidden_states=tokens(dtype=dtype))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_states": [[0.0]]}, "hidden_states must be a torch.Tensor, got list"),
        ({"topk_ids": None}, "topk_ids must be a torch.Tensor, got NoneType"),
        ({"runtime_max_tokens_per_rank": 3.0}, "runtime_max_tokens_per_rank must be an int"),
    ],
)
def test_arguments_of_another_type(changes, message):
    with pytest.raises(TypeError, match=message):
        check(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_states": tokens()[0]}, r"hidden_states must have 2 dimensions, got shape \[64\]"),
        ({"hidden_states": tokens(columns=63)}, "must have 64 columns .*got 63"),
        ({"topk_ids": ids()[0]}, r"topk_ids must have 2 dimensions, got shape \[2\]"),
        ({"topk_ids": ids(2)}, r"topk_ids must be \[n, top_k\] = \[3, 2\], got \[2, 2\]"),
        ({"topk_ids": ids(columns=3)}, r"= \[3, 2\], got \[3, 3\]"),
        ({"topk_weights": weights(4)}, r"topk_weights must be .* \[3, 2\], got \[4, 2\]"),
        ({"hidden_states": tokens().to("meta")}, "hidden_states must be on cpu.*got meta"),
        ({"topk_ids": ids().to("meta")}, "topk_ids must be on cpu.*got meta"),
        ({"hidden_states_scale": weights()}, "hidden_states_scale must be None"),
        ({"runtime_max_tokens_per_rank": 9}, "must be 0..8, got 9"),
        ({"runtime_max_tokens_per_rank": -1}, "must be 0..8, got -1"),
        ({"runtime_max_tokens_per_rank": 2}, "3 rows, more than runtime_max_tokens_per_rank=2"),
        ({"eplb_local_stats": ids()[:, 0]}, "eplb_local_stats must be None"),
    ],
)
def test_arguments_of_another_shape_device_or_size(changes, message):
    with pytest.raises(ValueError, match=message):
        check(**changes)


def test_more_rows_than_the_capacity_name_both():
    with pytest.raises(MoEEpConfigError, match=r"9 rows, more than max_tokens_per_rank=8 \(rank 0"):
        check(hidden_states=tokens(9), topk_ids=ids(9), topk_weights=weights(9))


def test_statistics_have_the_configured_length_and_dtype():
    check(stats=3, eplb_local_stats=torch.zeros(3, dtype=torch.int32))
    check(stats=3)
    with pytest.raises(MoEEpConfigError, match=r"eplb_local_stats must be .* = \[3\], got \[2\]"):
        check(stats=3, eplb_local_stats=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"eplb_local_stats must be torch.int32, got torch.int64"):
        check(stats=3, eplb_local_stats=torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("quant_format", "values", "columns", "scales", "scale_columns"),
    [
        (QuantFormat.BF16, torch.bfloat16, 64, None, 0),
        (QuantFormat.FP16, torch.float16, 64, None, 0),
        (QuantFormat.FP8PerTensor, torch.float8_e4m3fn, 64, None, 0),
        (QuantFormat.DeepSeekFp8, torch.float8_e4m3fn, 64, torch.float32, 1),
        (QuantFormat.MXFP8, torch.float8_e4m3fn, 64, torch.float8_e8m0fnu, 2),
        (QuantFormat.MXFP8, torch.uint8, 64, torch.uint8, 2),
        (QuantFormat.NVFP4, torch.uint8, 32, torch.float8_e4m3fn, 4),
        (QuantFormat.NVFP4, torch.float4_e2m1fn_x2, 32, torch.uint8, 4),
        (QuantFormat.MXFP4, torch.uint8, 32, torch.float8_e8m0fnu, 2),
    ],
)
def test_quantised_rows_have_their_format_s_dtypes(
    quant_format, values, columns, scales, scale_columns
):
    rows = torch.empty(3, columns, dtype=values)
    scale = None if scales is None else torch.empty(3, scale_columns, dtype=scales)
    check(quant_format, hidden_states=rows, hidden_states_scale=scale)

    with pytest.raises(TypeError, match="hidden_states must be"):
        check(quant_format, hidden_states=tokens(dtype=torch.float64), hidden_states_scale=scale)
    if scale is None:
        return
    with pytest.raises(MoEEpConfigError, match=rf"must be given, \[3, {scale_columns}\]"):
        check(quant_format, hidden_states=rows)
    with pytest.raises(MoEEpConfigError, match=rf"\[3, {scale_columns}\], got \[3, 5\]"):
        check(quant_format, hidden_states=rows, hidden_states_scale=scale.new_empty(3, 5))
    with pytest.raises(TypeError, match="hidden_states_scale must be"):
        check(quant_format, hidden_states=rows, hidden_states_scale=scale.to(torch.float64))


def test_rows_may_be_wider_as_bytes_up_to_the_extra_payload():
    for width in (128, 136):
        check(extra=8, hidden_states=tokens(dtype=torch.uint8, columns=width))
    for width in (127, 137):
        with pytest.raises(MoEEpConfigError, match=rf"must have 128..136 columns.*got {width}"):
            check(extra=8, hidden_states=tokens(dtype=torch.uint8, columns=width))


def test_gradients_are_refused_where_they_would_be_lost():
    with pytest.raises(MoEEpConfigError, match=r"hidden_states requires grad.*no_grad"):
        check(hidden_states=tokens().requires_grad_())
    with torch.no_grad():
        check(hidden_states=tokens().requires_grad_())


@pytest.mark.parametrize("n", [0, 9])
def test_dispatch_refuses_and_the_next_round_works(comm, n):
    with pytest.raises(MoEEpConfigError, match=r"topk_ids must be|more than max_tokens_per_rank"):
        comm.dispatch(tokens(n), ids(3), weights(3))


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (tokens(2), ValueError, r"output must be \[n, hidden_size\] = \[3, 64\], got \[2, 64\]"),
        (tokens(columns=63), ValueError, r"got \[3, 63\]"),
        (tokens(dtype=torch.float32), TypeError, "output must be torch.bfloat16"),
        (tokens().to("meta"), ValueError, "output must be on cpu"),
    ],
)
def test_a_wrong_output_leaves_the_round_open(comm, output, error, message):
    result = comm.dispatch(tokens(), ids(), weights())
    with pytest.raises(error, match=message):
        comm.combine(result.hidden_states, output=output)
    comm.combine(result.hidden_states)


@pytest.mark.parametrize(
    ("expert_output", "error", "message"),
    [
        (tokens(7), ValueError, r"must be \[8, 64\] or \[1, 8, 64\].*got \[7, 64\]"),
        (tokens(8, columns=63), ValueError, r"got \[8, 63\]"),
        (tokens(8)[None, None], ValueError, r"got \[1, 1, 8, 64\]"),
        (tokens(8, dtype=torch.float32), TypeError, "expert_output must be torch.bfloat16"),
        (None, TypeError, "expert_output must be a torch.Tensor"),
    ],
)
def test_a_wrong_expert_output_leaves_the_round_open(comm, expert_output, error, message):
    result = comm.dispatch(tokens(), ids(), weights())
    with pytest.raises(error, match=message):
        comm.combine(expert_output)
    comm.combine(result.hidden_states.unflatten(0, (1, CAPACITY)))


def test_construction_refuses_another_backend_s_config():
    params = MoEEpCommParams(4, TOP_K, CAPACITY, HIDDEN)
    with pytest.raises(TypeError, match="config must be a TorchDistConfig, got str"):
        TorchDistAlltoAll(ALONE, params, "torch_dist")
    with pytest.raises(TypeError, match="params must be a MoEEpCommParams, got dict"):
        TorchDistAlltoAll(ALONE, {})
    with pytest.raises(TypeError, match="bootstrap must be a BootstrapConfig, got NoneType"):
        TorchDistAlltoAll(None, params)


def test_construction_refuses_a_group_that_is_too_large():
    params = MoEEpCommParams(4, TOP_K, CAPACITY, HIDDEN)
    with pytest.raises(MoEEpConfigError, match=r"world_size must be 1..256, got 257"):
        TorchDistAlltoAll(BootstrapConfig(257, 0, device="cpu"), params)


@pytest.mark.parametrize("name", ["hidden_states", "topk_ids", "topk_weights"])
def test_a_sparse_tensor_is_refused_by_name(name):
    sparse = {"hidden_states": tokens(), "topk_ids": ids(), "topk_weights": weights()}[name]
    with pytest.raises(TypeError, match=rf"{name} must be dense.*got torch\.sparse_coo"):
        check(**{name: sparse.to_sparse()})


@pytest.mark.parametrize(
    "output",
    [
        torch.zeros(1, HIDDEN).bfloat16().expand(3, HIDDEN),
        torch.zeros(3, 1).bfloat16().expand(3, HIDDEN),
        torch.zeros(1, 1).bfloat16().expand(3, HIDDEN),
        torch.zeros(HIDDEN + 2).bfloat16().unfold(0, HIDDEN, 1),
        torch.zeros(3 * HIDDEN).bfloat16().as_strided((3, HIDDEN), (HIDDEN - 1, 1)),
        torch.zeros(3 * HIDDEN).bfloat16().as_strided((3, HIDDEN), (1, 2)),
    ],
)
def test_an_output_over_itself_leaves_the_round_open(comm, output):
    result = comm.dispatch(tokens(), ids(), weights())
    with pytest.raises(MoEEpConfigError, match="output must not overlap itself, got strides"):
        comm.combine(result.hidden_states, output=output)
    comm.combine(result.hidden_states)


@pytest.mark.parametrize(
    ("output", "n"),
    [
        (torch.full((HIDDEN, 3), 7.0).bfloat16().t(), 3),
        (torch.full((3, 2 * HIDDEN), 7.0).bfloat16()[:, ::2], 3),
        (torch.full((6, HIDDEN), 7.0).bfloat16()[::2], 3),
        (torch.full((HIDDEN,), 7.0).bfloat16().expand(1, HIDDEN), 1),
        (torch.full((1, 1), 7.0).bfloat16().expand(0, HIDDEN), 0),
    ],
)
def test_an_output_of_any_strides_is_written(comm, output, n):
    result = comm.dispatch(tokens(n) + 1, ids(n), weights(n))
    assert comm.combine(result.hidden_states, output=output) is output
    assert torch.equal(output, tokens(n) + 1)


def test_the_checks_of_combine_trace_into_one_graph():
    params = MoEEpCommParams(4, TOP_K, CAPACITY, HIDDEN)

    def rows_of(expert_output, output):
        check_combine(
            params,
            device=torch.device("cpu"),
            ep_size=1,
            num_tokens=output.shape[0],
            tokens_per_rank=CAPACITY,
            expert_output=expert_output,
            output=output,
        )
        return expert_output + 1

    compiled = torch.compile(rows_of, backend="eager", fullgraph=True, dynamic=True)
    for output in (tokens(3), tokens(5), tokens(6)[::2], tokens(HIDDEN, columns=4).t()):
        assert torch.equal(compiled(tokens(CAPACITY), output), tokens(CAPACITY) + 1)
    overlapping = tokens(1).expand(3, HIDDEN)
    with pytest.raises(MoEEpConfigError, match="output must not overlap itself"):
        rows_of(tokens(CAPACITY), overlapping)
    # How dynamo words an exception that it traced differs between torch versions.
    with pytest.raises(Exception):  # noqa: B017, PT011
        compiled(tokens(CAPACITY), overlapping)


def test_negated_views_and_inference_outputs_are_refused_before_anything_is_sent():
    params = MoEEpCommParams(4, TOP_K, CAPACITY, HIDDEN)
    sizes = {"device": torch.device("cpu"), "ep_size": 1, "num_tokens": 3}
    where = {**sizes, "tokens_per_rank": CAPACITY}
    negated = torch._neg_view(tokens(CAPACITY))
    with pytest.raises(TypeError, match="expert_output must hold its values"):
        check_combine(params, **where, expert_output=negated, output=None)
    with torch.inference_mode():
        output = tokens(3).clone()
        check_combine(params, **where, expert_output=tokens(CAPACITY), output=output)
    with pytest.raises(MoEEpConfigError, match="output must not be an inference tensor"):
        check_combine(params, **where, expert_output=tokens(CAPACITY), output=output)
