// Which ranks does a token go to, and with which ids? For the transports on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/expert_partition.h"
#include "core/rank_mask.h"
#include "core/status.h"

namespace moe_ep {

// Calls `visit(rank)` for each rank of the set, in ascending order.
template <typename Visit>
void for_each_rank(const RankMask& ranks, int32_t ep_size, Visit visit) {
  for (int32_t word = 0; word < rank_mask_words(ep_size); ++word) {
    for (uint64_t bits = ranks.words[word]; bits != 0; bits &= bits - 1) {
      visit(word * kRanksPerMaskWord + __builtin_ctzll(bits));
    }
  }
}

// The routing that a dispatch was given.
struct RoutingIn {
  const void* topk_ids;  // [num_tokens, top_k], int64 if ids_are_int64, else int32
  bool ids_are_int64;
  int32_t top_k;
  int64_t invalid_expert_id;
  RankMask active;
};

class TokenRouter {
 public:
  TokenRouter(const RoutingIn& in, int32_t num_experts, int32_t ep_size)
      : in_(in), partition_(num_experts, ep_size) {}

  // Ids that are neither an expert's nor padding are counted in `record`, which may be null.
  RankMask destinations_of(int32_t token, InvalidIdRecord* record) const {
    RankMask destinations;
    for (int32_t slot = 0; slot < in_.top_k; ++slot) {
      const int64_t expert = expert_id(token, slot);
      if (partition_.contains(expert)) {
        const int32_t owner = partition_.owner_of(static_cast<int32_t>(expert));
        if (in_.active.contains(owner)) destinations.insert(owner);
      } else if (expert >= 0 && expert != in_.invalid_expert_id && record != nullptr) {
        if (record->count++ == 0) {
          record->token = token;
          record->slot = slot;
          record->expert_id = expert;
          record->num_experts = partition_.num_experts();
        }
      }
    }
    return destinations;
  }

  // An id as the receivers see it: what lies outside [0, num_experts) arrives as the invalid id.
  int32_t id_to_send(int32_t token, int32_t slot) const {
    const int64_t expert = expert_id(token, slot);
    return static_cast<int32_t>(partition_.contains(expert) ? expert : in_.invalid_expert_id);
  }

 private:
  int64_t expert_id(int32_t token, int32_t slot) const {
    const int64_t i = static_cast<int64_t>(token) * in_.top_k + slot;
    return in_.ids_are_int64 ? static_cast<const int64_t*>(in_.topk_ids)[i]
                             : static_cast<const int32_t*>(in_.topk_ids)[i];
  }

  RoutingIn in_;
  ExpertPartition partition_;
};

}  // namespace moe_ep
