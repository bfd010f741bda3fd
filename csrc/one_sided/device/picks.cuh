// Expert ids and weights of a token, on their way to the ranks: one pick a lane until they are
// written, so that every format of the inputs takes the same way; usual picks have one of their
// own.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/destinations.cuh"
#include "one_sided/device/own_block.cuh"
#include "one_sided/device/places.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/workspace.cuh"

namespace moe_ep::one_sided {

// Lane k has pick k of the token; the lanes behind the last have nothing.
struct Pick {
  int64_t expert;
  float weight;
};
static_assert(kMaxTopK <= kWarpSize);

__device__ inline Pick load_pick(const DispatchKernelParams& p, int32_t token) {
  Pick pick{-1, 0.0f};
  if (lane_id() < p.workspace.top_k) {
    pick.expert = expert_id(p, token, lane_id());
    if (p.has_weights) {
      pick.weight = p.topk_weights[static_cast<int64_t>(token) * p.workspace.top_k + lane_id()];
    }
  }
  return pick;
}

// Writes `kCount` picks from `first` on, of a token to its row at each rank, and blanks a row's ids
// at the ranks that the token is not sent to.
template <int kCount, int kWords>
__device__ void send_some_picks(const DispatchKernelParams& p, const RankSet<kWords>& active,
                                const Place (&places)[kWords], int32_t id, float weight,
                                int32_t first) {
  struct alignas(kCount * 4) Ids {
    int32_t values[kCount];
  } ids;
  struct alignas(kCount * 4) Weights {
    float values[kCount];
  } weights;
  Ids blank;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    ids.values[i] = __shfl_sync(kAllLanes, id, first + i);
    weights.values[i] = __shfl_sync(kAllLanes, weight, first + i);
    blank.values[i] = p.invalid_expert_id;
  }
#pragma unroll 1  // for many ranks: eight rows at once are more than the registers hold
  for (int w = 0; w < kWords; ++w) {
    if (((active.words[w] >> lane_id()) & 1) == 0) continue;
    const DeviceSegment segment(p.workspace, w * kWarpSize + lane_id());
    const int64_t row =
        static_cast<int64_t>(p.workspace.ep_rank) * p.tokens_per_rank + places[w].row;
    *reinterpret_cast<Ids*>(segment.topk_ids(row) + first) = places[w].sent ? ids : blank;
    if (places[w].sent && p.has_weights) {
      *reinterpret_cast<Weights*>(segment.topk_weights(row) + first) = weights;
    }
  }
}

// Lane l speaks for the ranks 32 * w + l.
template <int kWords>
__device__ void send_picks(const DispatchKernelParams& p, const RankSet<kWords>& active,
                           const Place (&places)[kWords], int32_t token, const Pick& pick) {
  const int32_t id = id_to_send(p, pick.expert);
  if (p.workspace.top_k % 4 == 0) {  // rows of ids and weights start on 16 bytes
#pragma unroll 1
    for (int32_t k = 0; k < p.workspace.top_k; k += 4) {
      send_some_picks<4>(p, active, places, id, pick.weight, k);
    }
  } else {
#pragma unroll 1
    for (int32_t k = 0; k < p.workspace.top_k; ++k) {
      send_some_picks<1>(p, active, places, id, pick.weight, k);
    }
  }
  // Here since one warp of the grid comes by with each token.
  if (is_invalid(p, pick.expert)) record_invalid_id(p, token, lane_id(), pick.expert);
}

// Usual picks of a token, whole in every lane: UsualIds, and weights that start on 16 bytes.
struct UsualPicks {
  uint4 ids[2];
  uint4 weights[2];  // if there are any

  // Does not look at what it loads.
  __device__ static UsualPicks load(const DispatchKernelParams& p, uint32_t token) {
    UsualPicks picks;
    const UsualIds ids = UsualIds::load(UsualIds::address(p, static_cast<int32_t>(token)));
    picks.ids[0] = ids.low;
    picks.ids[1] = ids.high;
    if (p.has_weights) {
      const uint4* const weights = reinterpret_cast<const uint4*>(p.topk_weights) + 2 * token;
      picks.weights[0] = weights[0];
      picks.weights[1] = weights[1];
    }
    return picks;
  }
  __device__ bool are_experts(const DispatchKernelParams& p) const {
    const uint32_t low = max(max(ids[0].x, ids[0].y), max(ids[0].z, ids[0].w));
    const uint32_t high = max(max(ids[1].x, ids[1].y), max(ids[1].z, ids[1].w));
    return p.partition.contains(static_cast<int32_t>(max(low, high)));
  }
};

// send_picks for usual picks, without a shuffle. Lane l speaks for rank l.
__device__ inline void send_usual_picks(const DispatchKernelParams& p, const RankSet<1>& active,
                                        const OwnBlock& block, const Place (&places)[1],
                                        uint32_t token, const UsualPicks& picks) {
  if (!picks.are_experts(p)) {  // the same in all lanes
    send_picks(p, active, places, static_cast<int32_t>(token),
               load_pick(p, static_cast<int32_t>(token)));
    return;
  }
  if (((active.words[0] >> lane_id()) & 1) == 0) return;
  const auto row = static_cast<uint32_t>(places[0].row);
  const bool is_sent = places[0].sent;
  const auto invalid = static_cast<uint32_t>(p.invalid_expert_id);
  const auto id_there = [&](uint32_t id) { return is_sent ? id : invalid; };
  auto* const ids = reinterpret_cast<uint4*>(block.topk_ids(p, row));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4& four = picks.ids[i];
    ids[i] = make_uint4(id_there(four.x), id_there(four.y), id_there(four.z), id_there(four.w));
  }
  if (is_sent && p.has_weights) {
    auto* const weights = reinterpret_cast<uint4*>(block.topk_weights(p, row));
    weights[0] = picks.weights[0];
    weights[1] = picks.weights[1];
  }
}

// Tells combine where the token's rows are.
template <int kWords>
__device__ void write_send_slots(const DispatchKernelParams& p, const Place (&places)[kWords],
                                 int32_t token) {
  write_send_slots(p, places, own_segment(p.workspace).send_slots(token));
}
template <int kWords>
__device__ void write_send_slots(const DispatchKernelParams& p, const Place (&places)[kWords],
                                 SendSlot* slots) {
  int32_t count = 0;
#pragma unroll 1
  for (int w = 0; w < kWords; ++w) {
    const uint32_t sent = __ballot_sync(kAllLanes, places[w].sent);
    if (places[w].sent) {
      slots[count + __popc(sent & bits_below(lane_id()))] = {w * kWarpSize + lane_id(),
                                                             places[w].row};
    }
    count += __popc(sent);
  }
  if (lane_id() == 0 && count < p.workspace.max_destinations) slots[count] = {-1, 0};
}

// Gives `rows` rows of ids the invalid id. For the threads first, first + stride, ...
__device__ inline void blank_ids(const DispatchKernelParams& p, const DeviceSegment& segment,
                                 int64_t first_row, int64_t rows, int64_t first, int64_t stride) {
  const int32_t invalid = p.invalid_expert_id;
  int32_t* const ids = segment.topk_ids(first_row);
  const int64_t count = rows * p.workspace.top_k;
  if (p.workspace.top_k % 4 == 0) {
    const int4 four = make_int4(invalid, invalid, invalid, invalid);
#pragma unroll 1  // stores wait for nothing, and unrolled it begins with a long division
    for (int64_t i = first; i < count / 4; i += stride) reinterpret_cast<int4*>(ids)[i] = four;
  } else {
#pragma unroll 1
    for (int64_t i = first; i < count; i += stride) ids[i] = invalid;
  }
}

// Blanks what no token blanks: at the peers the rows behind this rank's own tokens, here the blocks
// of the ranks that do not take part. The whole grid together; needs no counts.
template <int kWords>
__device__ void blank_rows_without_token(const DispatchKernelParams& p,
                                         const RankSet<kWords>& active) {
  const DeviceSegment own = own_segment(p.workspace);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t tokens_per_rank = p.tokens_per_rank;
  const int64_t own_block = p.workspace.ep_rank * tokens_per_rank;
  const int64_t rest = tokens_per_rank - p.num_tokens;
  for (int32_t rank = 0; rank < p.workspace.ep_size; ++rank) {
    if (!active.contains(rank)) {
      blank_ids(p, own, rank * tokens_per_rank, tokens_per_rank, first, stride);
    } else if (rest > 0) {
      blank_ids(p, DeviceSegment(p.workspace, rank), own_block + p.num_tokens, rest, first, stride);
    }
  }
}

}  // namespace moe_ep::one_sided
