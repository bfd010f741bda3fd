// What the sources have said in their headers, as a warp gets to know it.
#pragma once

#include <cstdint>

#include "one_sided/device/agreement.cuh"
#include "one_sided/device/bounded_wait.cuh"
#include "one_sided/device/routing.cuh"

namespace moe_ep::one_sided {

// What a round is known by.
template <int kWords>
struct Round {
  uint32_t epoch;
  uint32_t signature;
  RankSet<kWords> active;
};

// Lane r stands for source 32 * window + r. The sources that a warp asks about ascend, so one
// window at a time is enough; up to 32 ranks there is only one.
template <int kWords>
class Announcements {
 public:
  // Of a source that is masked off, has not answered in time, or was called with other arguments.
  static constexpr int32_t kNothingComes = -1;

  __device__ Announcements(const DispatchKernelParams& p, const Round<kWords>& round,
                           bool abandoned)
      : p_(p), round_(round), abandoned_(abandoned) {
    open_window(0);
  }

  __device__ void look_at(int32_t source) {
    if (kWords > 1 && source / kWarpSize != window_) open_window(source / kWarpSize);
  }
  __device__ bool knows(int32_t source) const { return (known_ >> (source % kWarpSize)) & 1; }
  __device__ bool knows_window() const { return known_ == kAllLanes; }
  __device__ int32_t first_missing() const {
    return window_ * kWarpSize + __ffs(static_cast<int>(~known_)) - 1;
  }
  __device__ bool abandoned() const { return abandoned_; }
  // Valid once known.
  __device__ int32_t rows_of(int32_t source) const {
    return __shfl_sync(kAllLanes, rows_, source % kWarpSize);
  }
  // Of this lane's source.
  __device__ int32_t rows() const { return rows_; }

  // A look at the headers that are missing is a load and a `take`, so that other loads can fly with
  // it.
  __device__ uint4 load() const {
    uint4 header = make_uint4(0, 0, 0, 0);
    if (is_missing()) header = load_header(p_.workspace, this_source());
    return header;
  }
  __device__ void take(uint4 header) {
    const bool arrived = is_missing() && header.w == round_.epoch;
    if (arrived) {
      rows_ = header_agrees(p_, header, round_.signature) ? static_cast<int32_t>(header.x)
                                                          : kNothingComes;
    }
    known_ |= __ballot_sync(kAllLanes, arrived);
  }

  // Counts a look that did not bring what was waited for from `source`. True: give up.
  __device__ bool expired(Patience& patience, int32_t source, uint4 header) {
    // Each lane looks at its own source: one that has left is not hidden behind a slow one. If the
    // header is there and the rows are not, these are still of the round before.
    const int32_t peer = is_missing() ? this_source() : source;
    const uint32_t seen = is_missing() ? header.w : round_.epoch - 1;
    const bool now = patience.exhausted(p_.workspace, Phase::kDispatch, peer, round_.epoch, seen);
    if (!__any_sync(kAllLanes, now)) return false;
    abandon();
    return true;
  }

 private:
  __device__ bool is_missing() const { return ((known_ >> lane_id()) & 1) == 0; }
  __device__ int32_t this_source() const { return window_ * kWarpSize + lane_id(); }

  __device__ void open_window(int32_t window) {
    window_ = window;
    rows_ = kNothingComes;
    const bool awaited = !abandoned_ && round_.active.contains(this_source());
    known_ = ~__ballot_sync(kAllLanes, awaited);
  }
  // From now on everything is known, and nothing comes from who had not answered.
  __device__ void abandon() {
    abandoned_ = true;
    known_ = kAllLanes;
  }

  const DispatchKernelParams& p_;
  const Round<kWords>& round_;
  bool abandoned_;
  int32_t window_;
  int32_t rows_;
  uint32_t known_;
};

}  // namespace moe_ep::one_sided
