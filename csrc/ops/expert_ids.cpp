// Ops on expert ids and rank sets that no transport is needed for.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "core/limits.h"
#include "core/rank_mask.h"
#include "ops/errors.h"
#include "ops/expert_ids.h"
#include "ops/workspace_args.h"

namespace moe_ep::ops {

SanitizeArgs sanitize_args(const Tensor& topk_ids, const Tensor& recv_token_counts,
                           int64_t invalid_expert_id) {
  check(
      topk_ids.scalar_type() == ScalarType::Int && topk_ids.dim() == 3 && topk_ids.is_contiguous(),
      "topk_ids must be contiguous [ep_size, tokens_per_rank, top_k]");
  check(recv_token_counts.dim() == 1 && recv_token_counts.size(0) == topk_ids.size(0) &&
            recv_token_counts.is_contiguous(),
        "recv_token_counts must be contiguous [ep_size=", topk_ids.size(0), "]");
  check_dtype(recv_token_counts.scalar_type() == ScalarType::Int,
              "recv_token_counts must be int32");
  check(recv_token_counts.device() == topk_ids.device(),
        "recv_token_counts must be on the device of topk_ids");
  return {static_cast<int32_t*>(topk_ids.mutable_data_ptr()),
          static_cast<const int32_t*>(recv_token_counts.const_data_ptr()),
          topk_ids.size(0),
          topk_ids.size(1),
          topk_ids.size(2),
          checked_invalid_expert_id(invalid_expert_id)};
}

namespace {

void sanitize_expert_ids(Tensor topk_ids, Tensor recv_token_counts, int64_t invalid_expert_id) {
  const SanitizeArgs a = sanitize_args(topk_ids, recv_token_counts, invalid_expert_id);
  const int64_t block = a.tokens_per_rank * a.top_k;
  for (int64_t source = 0; source < a.num_sources; ++source) {
    const int64_t used = std::clamp<int64_t>(a.counts[source], 0, a.tokens_per_rank) * a.top_k;
    std::fill(a.ids + source * block + used, a.ids + (source + 1) * block, a.invalid_expert_id);
  }
}

Tensor active_rank_mask(std::vector<int64_t> ranks, int64_t ep_size) {
  check(ep_size >= 1 && ep_size <= kMaxEpSize, "ep_size must be in [1, ", kMaxEpSize, "], got ",
        ep_size);
  RankMask mask;
  for (const int64_t rank : ranks) {
    check(rank >= 0 && rank < ep_size, "ranks must be in [0, ", ep_size, "), got ", rank);
    mask.insert(static_cast<int32_t>(rank));
  }
  const int64_t words = rank_mask_words(static_cast<int32_t>(ep_size));
  Tensor tensor = torch::stable::empty({words}, ScalarType::UInt64);
  std::copy_n(mask.words, words, static_cast<uint64_t*>(tensor.mutable_data_ptr()));
  return tensor;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) {
  m.impl("sanitize_expert_ids", TORCH_BOX(&sanitize_expert_ids));
}
// They have no tensor argument to choose a device by.
STABLE_TORCH_LIBRARY_IMPL(moe_ep, CompositeExplicitAutograd, m) {
  m.impl("active_rank_mask", TORCH_BOX(&active_rank_mask));
  m.impl("set_interrupt_check", TORCH_BOX(&set_interrupt_check));
}

}  // namespace moe_ep::ops
