// Ops on expert ids and rank sets that no transport is needed for.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>

#include "core/limits.h"
#include "core/rank_mask.h"
#include "ops/errors.h"
#include "ops/workspace_args.h"

namespace moe_ep::ops {
namespace {

void sanitize_expert_ids(Tensor topk_ids, Tensor recv_token_counts, int64_t invalid_expert_id) {
  check(
      topk_ids.scalar_type() == ScalarType::Int && topk_ids.dim() == 3 && topk_ids.is_contiguous(),
      "topk_ids must be contiguous [ep_size, tokens_per_rank, top_k]");
  check(recv_token_counts.dim() == 1 && recv_token_counts.size(0) == topk_ids.size(0) &&
            recv_token_counts.is_contiguous(),
        "recv_token_counts must be contiguous [ep_size=", topk_ids.size(0), "]");
  check(invalid_expert_id >= std::numeric_limits<int32_t>::min() &&
            invalid_expert_id <= std::numeric_limits<int32_t>::max(),
        "invalid_expert_id must fit int32, got ", invalid_expert_id);
  auto* ids = static_cast<int32_t*>(topk_ids.mutable_data_ptr());
  const auto* counts = static_cast<const int32_t*>(recv_token_counts.const_data_ptr());
  const int64_t block = topk_ids.size(1) * topk_ids.size(2);
  for (int64_t source = 0; source < topk_ids.size(0); ++source) {
    const int64_t used =
        std::clamp<int64_t>(counts[source], 0, topk_ids.size(1)) * topk_ids.size(2);
    std::fill(ids + source * block + used, ids + (source + 1) * block,
              static_cast<int32_t>(invalid_expert_id));
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
