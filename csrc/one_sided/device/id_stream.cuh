// The expert ids of many tokens, a token a lane, on their way to a warp: loads that are looked at
// only when many are in flight, since each takes most of a microsecond.
//
// A lane's tokens lie `apart` tokens from each other, and are read as one sequence of loads of 16
// bytes. A token takes a power of two of them, so that shifts tell token and load of a place in the
// sequence; behind its last id a token reads as -1.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/routing.cuh"

namespace moe_ep::one_sided {

class IdStream {
 public:
  // This lane's first token, the distance to its next, and the end of the tokens that are read.
  __device__ IdStream(const DispatchKernelParams& p, int32_t token, int32_t apart, int32_t end)
      : p_(p), left_(end - token), apart_(apart) {
    row_bytes_ = p.workspace.top_k * (p.ids_are_int64 ? 8 : 4);
    first_ = static_cast<const uint8_t*>(p.topk_ids) + static_cast<int64_t>(token) * row_bytes_;
    // The first with 16 << shift_ bytes for a row.
    shift_ = row_bytes_ <= 16 ? 0 : 28 - __clz(row_bytes_ - 1);
  }

  // Whether rows of ids start on 16 bytes and are of whole 16 bytes.
  __device__ bool is_usable() const {
    return (reinterpret_cast<uint64_t>(p_.topk_ids) | static_cast<uint32_t>(row_bytes_)) %
               sizeof(int4) ==
           0;
  }

  __device__ int32_t places(int32_t tokens) const { return tokens << shift_; }
  __device__ int32_t token_at(int32_t place) const { return place >> shift_; }  // of this lane's
  __device__ bool ends_token(int32_t place) const { return token_at(place + 1) != token_at(place); }

  // Only of places below `places`; elsewhere, too, no token reads as -1.
  __device__ int4 load(int32_t place, int32_t places) const {
    const int32_t token = token_at(place) * apart_;
    const int32_t in_row = (place - (token_at(place) << shift_)) * static_cast<int>(sizeof(int4));
    int4 ids = make_int4(-1, -1, -1, -1);
    if (place < places && token < left_ && in_row < row_bytes_) {
      ids = *reinterpret_cast<const int4*>(first_ + (token * row_bytes_ + in_row));
    }
    return ids;
  }

  // Of what one load has brought.
  template <int kWords>
  __device__ void add_owners(int4 ids, RankSet<kWords>& set) const {
    if (p_.ids_are_int64) {
      add_owner(p_, narrowed(ids.x, ids.y), set);
      add_owner(p_, narrowed(ids.z, ids.w), set);
    } else {
      add_owner(p_, ids.x, set);
      add_owner(p_, ids.y, set);
      add_owner(p_, ids.z, set);
      add_owner(p_, ids.w, set);
    }
  }

 private:
  // What is too wide for 32 bits is no expert.
  __device__ static int32_t narrowed(int32_t low, int32_t high) { return high == 0 ? low : -1; }

  const DispatchKernelParams& p_;
  const uint8_t* first_;  // of the first token
  int32_t left_;          // tokens from there to the end
  int32_t apart_;
  int32_t row_bytes_;
  int32_t shift_;
};

}  // namespace moe_ep::one_sided
