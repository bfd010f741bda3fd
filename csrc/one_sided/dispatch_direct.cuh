// Dispatch of a few dozen tokens: rows go straight to their place at the receiver, with ordinary
// loads and stores of 16 bytes. No copy engine, no counter of work: both cost more here than they
// bring.
//
// Each warp has a fixed share of the pieces, and each CTA that has stored its share adds to the
// arrival word at every peer. CTA 0 alone waits for the peers, once its own share is done, and all
// other CTAs end. So CTAs need not run together: a late one delays the peers but hangs nobody.
//
// Order: a CTA barrier hands the stores of all threads on to those that signal, and their release
// at system scope to the peers. To itself a rank signals nothing: what it stores in its own segment
// is for later kernels of the stream, and complete when this one is.
#pragma once

#include <cstdint>

#include "core/device_signal.cuh"
#include "one_sided/cuda_params.h"
#include "one_sided/device/agreement.cuh"
#include "one_sided/device/bounded_wait.cuh"
#include "one_sided/device/direct_routes.cuh"
#include "one_sided/device/dispatch_tail.cuh"
#include "one_sided/device/picks.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/row_pieces.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

// Small CTAs: those of several ranks find room beside each other on a multiprocessor, where one of
// 1024 threads would wait until another rank's had ended, and its share of the rows with it (7 us
// of a round of 23 us, EP4 on one GPU). At most 64 registers a thread.
inline constexpr int kDirectDispatchThreads = 256;
inline constexpr int kDirectDispatchCtasPerSm = 1024 / kDirectDispatchThreads;
// A piece is what a warp moves at once: 1 KiB was best on an H200, rows of 14336 bytes.
inline constexpr int kChunksPerLane = 2;

using SentPiece = RowPiece<kChunksPerLane, /*kAligned=*/true>;

struct DirectDispatchParams {
  DispatchKernelParams dispatch;
  PieceShape shape;
  int32_t group_bits;  // groups of 32 tokens in tokens_per_rank: at most 2 to that
  EvenOwners owners;
};

// What a warp still owes to its own rank when the peers have theirs; nobody waits for it.
struct OwnPiece {
  SentPiece piece;
  uint8_t* row;  // null: nothing
};

// Returns the piece's row at this rank, which it leaves to the caller, or null.
__device__ inline uint8_t* send_to_peers(const DirectDispatchParams& params,
                                         const DirectRoutes& routes, const SentPiece& piece) {
  const DispatchKernelParams& p = params.dispatch;
  const int32_t own = p.workspace.ep_rank;
  const int64_t own_block = static_cast<int64_t>(own) * p.tokens_per_rank;
  const Place place = routes.place(p, piece.token);
  // Lane r: the row at rank r.
  uint8_t* const row = DeviceSegment(p.workspace, lane_id())
                           .payload_row(p.placement, piece.payload, own_block + place.row);
  const auto row_at = [&](int32_t rank) {
    return reinterpret_cast<uint8_t*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(row), rank));
  };
  const uint32_t sent = __ballot_sync(kAllLanes, place.sent);
#pragma unroll 1
  for (uint32_t peers = sent & ~(1u << own); peers != 0; peers &= peers - 1) {
    piece.store(params.shape, row_at(__ffs(static_cast<int>(peers)) - 1));
  }
  return ((sent >> own) & 1) != 0 ? row_at(own) : nullptr;
}

// Sends this warp's share, of which the first two pieces are on their way; then comes piece
// `index`, and each `step` pieces on. All but the last are stored at this rank, too.
__device__ inline OwnPiece send_pieces(const DirectDispatchParams& params,
                                       const DirectRoutes& routes, SentPiece (&pieces)[2],
                                       int32_t index, int32_t step) {
  if (pieces[0].token < 0) return {pieces[0], nullptr};
#pragma unroll 1
  for (;;) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // without moves, which would wait for what is on its way
      uint8_t* const own_row = send_to_peers(params, routes, pieces[i]);
      if (pieces[1 - i].token < 0) return {pieces[i], own_row};
      if (own_row != nullptr) pieces[i].store(params.shape, own_row);
      pieces[i] = SentPiece::load(params.dispatch, params.shape, index);
      index += step;
    }
  }
}

// Ids, weights and send slots of tokens `token`, `token` + step, ...
__device__ inline void send_all_picks(const DispatchKernelParams& p, const RankSet<1>& active,
                                      const DirectRoutes& routes, Pick pick, int32_t token,
                                      int32_t step) {
#pragma unroll 1
  while (token < p.num_tokens) {
    const Place places[1] = {routes.place(p, token)};
    send_picks(p, active, places, token, pick);
    write_send_slots(p, places, token);
    token += step;
    if (token < p.num_tokens) pick = load_pick(p, token);
  }
}

// Apart, so that its registers do not weigh on the rest: most rounds have none.
__device__ __noinline__ void blank_some_rows(const DispatchKernelParams& p, RankSet<1> active) {
  blank_rows_without_token(p, active);
}

__device__ inline bool has_rows_without_token(const DispatchKernelParams& p,
                                              const RankSet<1>& active) {
  const int32_t ranks = p.workspace.ep_size;
  return p.num_tokens < p.tokens_per_rank ||
         active.words[0] != (ranks == kWarpSize ? kAllLanes : bits_below(ranks));
}

// As signal_arrival, except that CTA 0 counts for the whole grid at the own rank: all that has to
// arrive there before this kernel ends is what CTA 0 itself stores.
__device__ inline void signal_peers(const DispatchKernelParams& p, const RankSet<1>& active) {
  const auto peer = static_cast<int32_t>(threadIdx.x);
  const bool leads = blockIdx.x == 0;
  const bool is_own = peer == p.workspace.ep_rank;
  if (peer >= p.workspace.ep_size || !active.contains(peer) || (is_own && !leads)) return;
  const uint32_t others = is_own ? 0 : gridDim.x - 1;
  signal_add(DeviceSegment(p.workspace, peer).dispatch_arrivals(p.workspace.ep_rank),
             leads ? kArrivalsPerRound - others : 1, p.workspace.reach);
}

template <typename Ids>
__global__ void __launch_bounds__(kDirectDispatchThreads, kDirectDispatchCtasPerSm)
    dispatch_direct_kernel(const __grid_constant__ DirectDispatchParams params) {
  __shared__ DirectRoutes routes;
  const DispatchKernelParams& p = params.dispatch;
  const bool leads = blockIdx.x == 0;
  const auto warp_in_cta = static_cast<int32_t>(threadIdx.x / kWarpSize);
  const auto warps_in_cta = static_cast<int32_t>(blockDim.x / kWarpSize);
  const int32_t step = static_cast<int32_t>(gridDim.x) * warps_in_cta;
  // Neighbours in the list of pieces are on different multiprocessors; picks begin at the other
  // end, with the warps that have fewer pieces.
  const auto warp = static_cast<int32_t>(warp_in_cta * gridDim.x + blockIdx.x);
  const int32_t first_pick = step - 1 - warp;
  if constexpr (Ids::kAddsToRoutes) routes.clear();

  wait_for_previous_kernel();
  // All these loads fly together. Those last whose values the compiler wants in uniform registers:
  // the move waits for the load.
  Ids ids(p, params.group_bits, warp_in_cta);
  SentPiece pieces[2] = {SentPiece::load(p, params.shape, warp),
                         SentPiece::load(p, params.shape, warp + step)};
  Pick pick{};
  if (first_pick < p.num_tokens) pick = load_pick(p, first_pick);
  const bool failed = has_failed(p.workspace);
  const uint32_t epoch = own_segment(p.workspace).state()->dispatch_epoch + 1;
  const RankSet<1> active = active_ranks<1>(p.workspace, p.active);
  if constexpr (Ids::kAddsToRoutes) __syncthreads();  // the routes are clear
  ids.add_to(routes, params.owners, active, warps_in_cta);

  // Threads may differ in what they saw of a failure; behind the barrier they agree.
  if (__syncthreads_or(failed)) {
    if (leads) void_round(p);
    return;
  }
  if (leads && warp_in_cta == warps_in_cta - 1 && active.contains(lane_id())) {
    send_header(p, lane_id(), routes.total(), round_signature(p, active), epoch);
  }
  const OwnPiece late = send_pieces(params, routes, pieces, warp + 2 * step, step);
  send_all_picks(p, active, routes, pick, first_pick, step);
  if (has_rows_without_token(p, active)) blank_some_rows(p, active);
  if (leads) send_stats(p, active);
  __syncthreads();
  signal_peers(p, active);
  if (late.row != nullptr) late.piece.store(params.shape, late.row);
  if (leads) {
    prepare_combine(p, active, epoch);
    receive(p, active, epoch);
  }
}

}  // namespace moe_ep::one_sided
