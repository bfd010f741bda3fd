// What must be the same on all ranks of a round.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/limits.h"
#include "core/workspace_layout.h"

namespace moe_ep {

MOE_EP_HOST_DEVICE inline bool same_round(const RoundHeader& a, const RoundHeader& b) {
  bool same = a.tokens_per_rank == b.tokens_per_rank && a.has_weights == b.has_weights &&
              a.has_stats == b.has_stats && a.num_payloads == b.num_payloads &&
              a.top_k == b.top_k && a.num_experts == b.num_experts;
  for (int32_t i = 0; i < kMaxPayloads; ++i) same = same && a.row_bytes[i] == b.row_bytes[i];
  return same;
}

MOE_EP_HOST_DEVICE inline bool same_rows(const CombineFlag& a, const CombineFlag& b) {
  return a.row_type == b.row_type && a.hidden_size == b.hidden_size &&
         a.low_precision == b.low_precision;
}

}  // namespace moe_ep
