"""What does a case exchange? Sizes, inputs, the bytes that must move, and the exact results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep import MoEEpCommParams, MoEEpDispatchResult
from moe_ep.reference import expert_owners

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROUTINGS = ("random", "balanced", "skewed", "hot")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table: how much every rank sends, and where to."""

    ranks: int
    dtype: str
    hidden_size: int
    tokens: int
    num_experts: int
    top_k: int
    routing: str
    zero_copy: bool
    seed: int

    @property
    def params(self) -> MoEEpCommParams:
        return MoEEpCommParams(
            num_experts=self.num_experts,
            top_k=self.top_k,
            max_tokens_per_rank=self.tokens,
            hidden_size=self.hidden_size,
            dtype=DTYPES[self.dtype],
        )

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class PhysicalBytes:
    """Bytes of rows that all ranks together must read and write in a round; no ids, no weights.

    dispatch: every row read once and written once for each rank that gets it.
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


def destinations(case: Case, topk_ids: Tensor) -> Tensor:
    """[tokens, ranks] bool: which ranks own at least one expert of each token."""
    owners = expert_owners(case.num_experts, case.ranks)[topk_ids]
    return torch.zeros(len(topk_ids), case.ranks, dtype=torch.bool).scatter_(1, owners, True)


class Workload:
    """The inputs of all ranks, made alike everywhere from the seed, and what `rank` must get."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.rank = rank
        self._all_ids = [route(case, source) for source in range(case.ranks)]
        self._all_destinations = [destinations(case, ids) for ids in self._all_ids]
        self.hidden_states = self._rows_of(rank)
        self.topk_ids = self._all_ids[rank].to(torch.int32)
        self.topk_weights = self._weights_of(rank)

    @property
    def physical_bytes(self) -> PhysicalBytes:
        tokens = self.case.ranks * self.case.tokens
        copies = sum(int(sent.sum()) for sent in self._all_destinations)
        moved = (tokens + copies) * self.case.row_bytes
        return PhysicalBytes(dispatch=moved, combine=moved)

    def evaluate_experts(self, received_rows: Tensor, into: Tensor) -> None:
        """Write this rank's stand-in for the experts' outputs: another factor on every rank."""
        torch.mul(received_rows, 0.5**self.rank, out=into)

    def check_dispatch(self, result: MoEEpDispatchResult) -> None:
        """Raise AssertionError unless every row, id, weight and count is as it was sent."""
        tpr = result.tokens_per_rank
        for source, sent in enumerate(self._all_destinations):
            here = sent[:, self.rank]
            filled = slice(source * tpr, source * tpr + int(here.sum()))
            empty = slice(filled.stop, (source + 1) * tpr)
            what = f"received from rank {source}"
            self._require_equal(
                f"rows {what}", result.hidden_states[filled], self._rows_of(source)[here]
            )
            ids = self._all_ids[source].to(torch.int32)[here]
            self._require_equal(f"ids {what}", result.topk_ids[filled], ids)
            no_ids = torch.full_like(result.topk_ids[empty], self.case.params.invalid_expert_id)
            self._require_equal(
                f"ids of empty rows for rank {source}", result.topk_ids[empty], no_ids
            )
            assert result.topk_weights is not None, "dispatch returned no weights"
            weights = self._weights_of(source)[here]
            self._require_equal(f"weights {what}", result.topk_weights[filled], weights)
        counts = torch.stack([sent[:, self.rank].sum() for sent in self._all_destinations])
        self._require_equal("counts", result.recv_token_counts, counts.to(torch.int32))

    def check_combine(self, combined: Tensor) -> None:
        """Raise AssertionError unless every element is the float32 sum, rounded once."""
        total = torch.zeros(self.hidden_states.shape, dtype=torch.float32)
        for owner, sent in enumerate(self._all_destinations[self.rank].unbind(1)):
            total[sent] += (self.hidden_states[sent] * 0.5**owner).float()
        self._require_equal("combined rows", combined, total.to(combined.dtype))

    def _rows_of(self, source: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.case.seed * 2003 + source)
        rows = torch.randn(self.case.tokens, self.case.hidden_size, generator=generator)
        return rows.to(DTYPES[self.case.dtype])

    def _weights_of(self, source: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.case.seed * 3001 + source)
        return torch.rand(self.case.tokens, self.case.top_k, generator=generator).softmax(dim=-1)

    def _require_equal(self, what: str, got: Tensor, wanted: Tensor) -> None:
        # Rows are finite and no sum is -0.0, so that equal values are equal bits.
        if got.dtype == wanted.dtype and torch.equal(got, wanted):
            return
        message = (
            f"rank {self.rank}, {self.case}: {what}: wanted {wanted.dtype} {list(wanted.shape)}"
        )
        if got.dtype != wanted.dtype or got.shape != wanted.shape:
            raise AssertionError(f"{message}, got {got.dtype} {list(got.shape)}")
        place = tuple((got != wanted).nonzero()[0].tolist())
        count = int((got != wanted).sum())
        raise AssertionError(
            f"{message}: {count} elements differ, the first at {place}: "
            f"wanted {wanted[place].item()}, got {got[place].item()}"
        )
