// Arguments of sanitize_expert_ids, on every device.
#pragma once

#include <cstdint>

#include "ops/workspace_args.h"

namespace moe_ep::ops {

struct SanitizeArgs {
  int32_t* ids;           // [num_sources, tokens_per_rank, top_k]
  const int32_t* counts;  // [num_sources]
  int64_t num_sources;
  int64_t tokens_per_rank;
  int64_t top_k;
  int32_t invalid_expert_id;
};

SanitizeArgs sanitize_args(const Tensor& topk_ids, const Tensor& recv_token_counts,
                           int64_t invalid_expert_id);

}  // namespace moe_ep::ops
