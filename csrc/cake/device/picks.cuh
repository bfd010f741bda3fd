// Expert ids and weights of a token, on their way to the ranks: one pick a lane until they are
// written, so that every format of the inputs takes the same way.
#pragma once

#include <cstdint>

#include "cake/cuda_params.h"
#include "cake/device/route_table.cuh"
#include "cake/device/routing.cuh"
#include "cake/device/workspace.cuh"

namespace moe_ep::cake {

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
    for (int32_t k = 0; k < p.workspace.top_k; k += 4) {
      send_some_picks<4>(p, active, places, id, pick.weight, k);
    }
  } else {
    for (int32_t k = 0; k < p.workspace.top_k; ++k) {
      send_some_picks<1>(p, active, places, id, pick.weight, k);
    }
  }
  // Here since one warp of the grid comes by with each token.
  if (is_invalid(p, pick.expert)) record_invalid_id(p, token, lane_id(), pick.expert);
}

// Tells combine where the token's rows are.
template <int kWords>
__device__ void write_send_slots(const DispatchKernelParams& p, const Place (&places)[kWords],
                                 int32_t token) {
  SendSlot* const slots = own_segment(p.workspace).send_slots(token);
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
    for (int64_t i = first; i < count / 4; i += stride) reinterpret_cast<int4*>(ids)[i] = four;
  } else {
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

}  // namespace moe_ep::cake
