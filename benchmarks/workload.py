"""What does a case exchange? Sizes, inputs, the bytes that must move, and the exact results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep import MoEEpCommParams, MoEEpDispatchResult, QuantFormat
from moe_ep.params import row_format
from moe_ep.quantization import dequantize_fp8, quantize_to_fp8
from moe_ep.reference import expert_owners, round_once, token_destinations

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DISPATCH_FORMATS = {"none": None, **{quant.value: quant for quant in QuantFormat}}
ROUTINGS = ("random", "balanced", "skewed", "hot")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table: how much every rank sends, and where to.

    dispatch_format: a key of DISPATCH_FORMATS; "none": rows travel in `dtype`.
    gpus: that the ranks share, in blocks of neighbours; 0 on the CPU.
    """

    ranks: int
    gpus: int
    dtype: str
    dispatch_format: str
    hidden_size: int
    tokens: int
    num_experts: int
    top_k: int
    routing: str
    seed: int

    @property
    def params(self) -> MoEEpCommParams:
        return MoEEpCommParams(
            num_experts=self.num_experts,
            top_k=self.top_k,
            max_tokens_per_rank=self.tokens,
            hidden_size=self.hidden_size,
            dtype=DTYPES[self.dtype],
            dispatch_format=DISPATCH_FORMATS[self.dispatch_format],
        )

    def gpu_of(self, rank: int) -> int:
        """Return the GPU of a rank, 0 on the CPU."""
        return rank * self.gpus // self.ranks


@dataclass(frozen=True)
class PhysicalBytes:
    """Bytes of rows that all ranks together must read and write in a round; no ids, no weights.

    dispatch: every row (with its scales) read once and written once for each rank that gets it.
    combine: every partial row read once, and one result row written for each token.
    """

    dispatch: int
    combine: int

    @property
    def round(self) -> int:
        return self.dispatch + self.combine


def route(case: Case, rank: int) -> Tensor:
    """[tokens, top_k] int64: the distinct experts of each token of `rank`.

    random: all experts are equally likely.
    balanced: all experts get equally many tokens; a token's experts spread over the ranks.
    skewed: the popularity of experts falls as 1 / place, with the places shuffled.
    hot: every pick is the last rank's, as far as it owns enough experts.
    """
    generator = torch.Generator().manual_seed(case.seed * 1009 + rank)
    scores = torch.rand(case.tokens, case.num_experts, generator=generator)
    match case.routing:
        case "random":
            pass
        case "balanced":
            first = torch.arange(case.tokens)[:, None] + rank * case.tokens
            step = case.num_experts // case.top_k
            return (first + step * torch.arange(case.top_k)) % case.num_experts
        case "skewed":
            shuffle = torch.Generator().manual_seed(case.seed)
            places = torch.randperm(case.num_experts, generator=shuffle) + 1
            # Drawing without replacement: the largest of log(popularity) + Gumbel noise.
            scores = -(-scores.log()).log() - places.float().log()
        case "hot":
            owners = expert_owners(case.num_experts, case.ranks)
            scores += owners == owners[-1]
    return scores.topk(case.top_k).indices


class Workload:
    """The inputs of all ranks, made alike everywhere from the seed, and what `rank` must get.

    All tensors are on `device`. Rows are random, never zeros. Where they go is the oracle's word
    (`moe_ep.reference.token_destinations`); sums are taken and rounded as there.
    """

    def __init__(self, case: Case, rank: int, device: torch.device) -> None:
        self.case = case
        self.rank = rank
        self.device = device
        params = case.params
        ids = [route(case, source) for source in range(case.ranks)]
        sent = [token_destinations(params, case.ranks, one) for one in ids]
        self._copies = torch.stack([one.sum(dim=0) for one in sent])
        """[source, owner]: rows that travel."""
        self._ids = [one.to(device, torch.int32) for one in ids]
        self._sent = [one.to(device) for one in sent]
        self._tokens = [self._tokens_of(source) for source in range(case.ranks)]
        """[tokens, hidden_size] of each source, in `dtype`: what experts compute with."""
        self.hidden_states, self.hidden_states_scale = self._travelling_rows(rank)
        self.topk_ids = self._ids[rank]
        self.topk_weights = self._weights_of(rank)

    def physical_bytes(self, *, fp8_combine: bool = False) -> PhysicalBytes:
        """fp8_combine: of a round whose rows travel back as scaled FP8."""
        params, copies = self.case.params, int(self._copies.sum())
        tokens = self.case.ranks * self.case.tokens
        return PhysicalBytes(
            dispatch=(tokens + copies) * params.dispatch_bytes_per_token,
            combine=tokens * params.combine_bytes_per_token + copies * self._row_back(fp8_combine),
        )

    def link_bytes(self, *, fp8_combine: bool = False) -> int:
        """Bytes of rows that leave, or reach, the busiest GPU in a round."""
        params, case = self.case.params, self.case
        row_back = self._row_back(fp8_combine)
        leave, reach = [0] * max(case.gpus, 1), [0] * max(case.gpus, 1)
        for source, row in enumerate(self._copies.tolist()):
            for owner, copies in enumerate(row):
                here, there = case.gpu_of(source), case.gpu_of(owner)
                if here != there:
                    leave[here] += copies * params.dispatch_bytes_per_token
                    reach[there] += copies * params.dispatch_bytes_per_token
                    leave[there] += copies * row_back
                    reach[here] += copies * row_back
        return max(leave + reach)

    def evaluate_experts(self, into: Tensor) -> None:
        """Write this rank's stand-in for the experts' outputs: another factor on every rank.

        into: [ranks * tokens, hidden_size]. Rows without a token become NaN, so that a combine
        that reads one is found out.
        """
        blocks = into.view(self.case.ranks, self.case.tokens, self.case.hidden_size)
        for source, block in enumerate(blocks):
            partial = self._partial_rows(source, owner=self.rank)
            block[: len(partial)] = partial
            block[len(partial) :] = float("nan")

    def check_dispatch(self, result: MoEEpDispatchResult) -> None:
        """Raise AssertionError unless every row, scale, id, weight and count is as it was sent."""
        tpr = result.tokens_per_rank
        assert result.topk_weights is not None, "dispatch returned no weights"
        for source, sent in enumerate(self._sent):
            here = sent[:, self.rank]
            count = int(self._copies[source, self.rank])
            filled = slice(source * tpr, source * tpr + count)
            empty = slice(filled.stop, (source + 1) * tpr)
            what = f"received from rank {source}"
            rows, scales = self._travelling_rows(source)
            self._require_equal(f"rows {what}", result.hidden_states[filled], rows[here])
            if scales is not None:
                assert result.hidden_states_scale is not None, "dispatch returned no scales"
                got = result.hidden_states_scale[filled]
                self._require_equal(f"scales {what}", got, scales[here])
            self._require_equal(f"ids {what}", result.topk_ids[filled], self._ids[source][here])
            no_ids = torch.full_like(result.topk_ids[empty], self.case.params.invalid_expert_id)
            self._require_equal(
                f"ids of empty rows for rank {source}", result.topk_ids[empty], no_ids
            )
            weights = self._weights_of(source)[here]
            self._require_equal(f"weights {what}", result.topk_weights[filled], weights)
        counts = self._copies[:, self.rank].to(self.device, torch.int32)
        self._require_equal("counts", result.recv_token_counts, counts)

    def check_combine(self, combined: Tensor, *, fp8_combine: bool = False) -> None:
        """Raise AssertionError unless every element is the float32 sum, rounded once.

        fp8_combine: of the rows as scaled FP8.
        """
        shape = (self.case.tokens, self.case.hidden_size)
        total = torch.zeros(shape, dtype=torch.float32, device=self.device)
        for owner in range(self.case.ranks):
            sent = self._sent[self.rank][:, owner]
            rows = self._partial_rows(self.rank, owner).float()
            total[sent] += dequantize_fp8(*quantize_to_fp8(rows)) if fp8_combine else rows
        self._require_equal("combined rows", combined, round_once(total, combined.dtype))

    def _row_back(self, fp8_combine: bool) -> int:
        """Return the bytes of a row that combine moves."""
        params = self.case.params
        if not fp8_combine:
            return params.combine_bytes_per_token
        return row_format(QuantFormat.DeepSeekFp8, params.hidden_size, params.token_dtype).row_bytes

    def _partial_rows(self, source: int, owner: int) -> Tensor:
        """[copies, hidden_size]: what `owner` returns for the tokens that `source` sent it."""
        return self._tokens[source][self._sent[source][:, owner]] * (owner + 1)

    def _tokens_of(self, source: int) -> Tensor:
        dtype = DTYPES[self.case.dtype]
        rows = torch.empty(self.case.tokens, self.case.hidden_size, dtype=dtype, device=self.device)
        # 24 bits: exact in float32, then rounded to the dtype. Within [-2, 2).
        _fill_random(rows, self._key(source, 1), lambda words: ((words >> 8) - 2**23) / 2.0**22)
        return rows

    def _travelling_rows(self, source: int) -> tuple[Tensor, Tensor | None]:
        """Return (hidden_states, hidden_states_scale) of a rank; quantised ones are any bytes."""
        params = self.case.params
        if params.dispatch_format is None:
            return self._tokens[source], None
        stored = params.row_format
        values = self._bytes_of(source, 2, stored.value_bytes).view(stored.value_dtypes[0])
        if stored.scale_bytes == 0:
            return values, None
        scales = self._bytes_of(source, 3, stored.scale_bytes)
        return values, scales.view(stored.scale_dtypes[0])

    def _bytes_of(self, source: int, what: int, row_bytes: int) -> Tensor:
        rows = torch.empty(self.case.tokens, row_bytes, dtype=torch.uint8, device=self.device)
        _fill_random(rows, self._key(source, what), lambda words: words >> 24)
        return rows

    def _key(self, source: int, what: int) -> int:
        return (self.case.seed * 2003 + source * 4 + what) * 0x9E3779B1

    def _weights_of(self, source: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.case.seed * 3001 + source)
        weights = torch.rand(self.case.tokens, self.case.top_k, generator=generator)
        return weights.softmax(dim=-1).to(self.device)

    def _require_equal(self, what: str, got: Tensor, wanted: Tensor) -> None:
        same_kind = got.dtype == wanted.dtype and got.shape == wanted.shape
        if same_kind and torch.equal(_bits(got), _bits(wanted)):
            return
        message = (
            f"rank {self.rank}, {self.case}: {what}: wanted {wanted.dtype} {list(wanted.shape)}"
        )
        if not same_kind:
            raise AssertionError(f"{message}, got {got.dtype} {list(got.shape)}")
        differ = _bits(got) != _bits(wanted)
        place = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{message}: {int(differ.sum())} bytes differ, the first at {place}: "
            f"wanted {_bits(wanted)[place].item():#04x}, got {_bits(got)[place].item():#04x}"
        )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _fill_random(rows: Tensor, key: int, number_of: Callable[[Tensor], Tensor]) -> None:
    """Fill [n, columns] with the numbers of random 32-bit words; the same on every device.

    Not by torch's generators: on a GPU their numbers depend on how many multiprocessors there are.
    """
    columns = rows.shape[1]
    for first in range(0, len(rows), 1024):  # the words take 8 bytes an element
        block = rows[first : first + 1024]
        words = torch.arange(block.numel(), device=rows.device).add_(first * columns + key)
        words &= 0xFFFFFFFF
        for _ in range(2):
            words ^= words >> 16
            words *= 0x45D9F3B
            words &= 0xFFFFFFFF
        words ^= words >> 16
        block.copy_(number_of(words).view(-1, columns))
