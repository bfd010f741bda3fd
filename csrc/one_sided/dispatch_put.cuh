// Dispatch of any number of tokens without a copy engine: rows go straight to their place at the
// receiver, through registers. The kernel goes as in_place_dispatch.cuh has it.
//
// A warp has two pieces of rows at hand: while one is stored at all its ranks, the other is on its
// way. Pieces come from a counter: multiprocessors differ in speed, and a CTA that starts late
// finds nothing left.
//
// Order: a CTA barrier hands the stores of all threads on to those that signal, and their release
// to the peers.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/in_place_dispatch.cuh"
#include "one_sided/device/picks.cuh"
#include "one_sided/device/places.cuh"
#include "one_sided/device/route_table.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/row_pieces.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"
#include "transport/device/schedule.cuh"
#include "transport/device/share.cuh"

namespace moe_ep::one_sided {

// Of one payload: 3584 bytes, a quarter of a row of 7168 bfloat16. Rows that are not aligned are
// put together from words, which takes more registers.
template <bool kAligned>
using PutPiece = RowPiece<kAligned ? 7 : 2, kAligned>;

struct PutParams {
  DispatchKernelParams dispatch;
  RouteTableShape table;
  PieceShape shape;
  int32_t first_payload;  // of a token's first piece
  uint32_t num_items;     // pieces of all tokens
  Share share;
};

// Of one thread, as dispatch_in_place asks for it.
template <int kWords, bool kAligned>
class PutRows {
 public:
  __device__ explicit PutRows(const PutParams& params)
      : params_(params),
        p_(params.dispatch),
        counter_(&own_segment(params.dispatch.workspace).state()->dispatch_items),
        works_(threadIdx.x / kWarpSize < params.share.warps) {}

  __device__ void wait_for_previous_kernel(const DeviceState* state) const {
    wait_for_previous_kernel_knowing(counter_.address(), state);
  }
  __device__ void reserve() {
    if (works_ && lane_id() == 0) next_ = counter_.take(params_.share.first_items);
  }
  __device__ void ask_ids(const RouteTable<kWords>&, int32_t) const {}

  // As in bulk: first ids, then rows; but those that are put together keep the lanes busy.
  __device__ void scan(RouteTable<kWords>& table, const RankSet<kWords>& active, int32_t first) {
    constexpr int kLoads = kWords > 1 ? 1 : 4;  // what the registers have room for
    const auto fill = [&] {
      if (first == 0) this->fill();
    };
    if constexpr (kAligned) {
      table.template scan<kLoads>(active, first, fill);
    } else {
      table.template scan<kLoads>(active, first, [] {});
      fill();
    }
  }
  __device__ bool has_items() const { return pieces_[0].token >= 0 || pieces_[1].token >= 0; }
  __device__ void top_up() {
    if (works_ && params_.share.first_items == 1) load_next(pieces_[1]);
  }
  __device__ void send(const RankSet<kWords>& active, const RouteTable<kWords>& table,
                       int32_t end) {
    // Without moves between the two, which would wait for what is on its way.
    for (;;) {
      if (!second_is_next_ && !send_piece(active, table, end, pieces_[0])) return;
      second_is_next_ = true;
      if (!send_piece(active, table, end, pieces_[1])) return;
      second_is_next_ = false;
    }
  }
  __device__ void complete() const {}
  __device__ void drain() const {}

 private:
  using Piece = PutPiece<kAligned>;

  __device__ void fill() {
    if (!works_) return;
    const uint32_t first = __shfl_sync(kAllLanes, next_, 0);
    load(pieces_[0], first);
    if (params_.share.first_items > 1) load(pieces_[1], first + 1);
    if (lane_id() == 0) {
      next_ = params_.share.more && first < params_.num_items ? counter_.take(1) : kNoItem;
    }
  }

  // The number was asked for one piece ago, and the one after it is asked for now.
  __device__ void load_next(Piece& piece) {
    const uint32_t item = __shfl_sync(kAllLanes, next_, 0);
    load(piece, item);
    if (lane_id() == 0 && item < params_.num_items) next_ = counter_.take(1);
  }

  __device__ void load(Piece& piece, uint32_t item) const {
    piece = Piece::load(p_, params_.shape, static_cast<int32_t>(min(item, params_.num_items)));
  }

  // Sends the piece to all ranks of its token, and asks for another one in its place. False: it is
  // of a later step, or there is none.
  __device__ bool send_piece(const RankSet<kWords>& active, const RouteTable<kWords>& table,
                             int32_t end, Piece& piece) {
    const int32_t token = piece.token;
    if (token < 0 || token >= end) return false;
    const int64_t own_block = static_cast<int64_t>(p_.workspace.ep_rank) * p_.tokens_per_rank;
    const bool is_first = piece.payload == params_.first_payload && piece.chunk == lane_id();
    Pick pick{};
    if (is_first) pick = load_pick(p_, token);  // here while the piece is being stored
    Place places[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int32_t rank = w * kWarpSize + lane_id();
      places[w] = table.of_rank(rank).place(p_, token);
      const uint8_t* const row =
          DeviceSegment(p_.workspace, rank)
              .payload_row(p_.placement, piece.payload, own_block + places[w].row);
#pragma unroll 1
      for (uint32_t ranks = __ballot_sync(kAllLanes, places[w].sent); ranks != 0;
           ranks &= ranks - 1) {
        const auto there = __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(row),
                                       __ffs(static_cast<int>(ranks)) - 1);
        piece.store(params_.shape, reinterpret_cast<uint8_t*>(there));
      }
    }
    load_next(piece);
    if (is_first) {
      send_picks(p_, active, places, token, pick);
      write_send_slots(p_, places, token);
    }
    return true;
  }

  const PutParams& params_;
  const DispatchKernelParams& p_;
  ItemCounter counter_;
  bool works_;               // this warp takes items; if not, it never has one
  uint32_t next_ = kNoItem;  // lane 0: taken from the counter, not loaded
  bool second_is_next_ = false;
  Piece pieces_[2] = {Piece::none(), Piece::none()};
};

// At most 128 registers a thread, so that 512 fit; one CTA a multiprocessor.
template <int kWords, bool kAligned>
__global__ void __launch_bounds__(kInPlaceThreads, 1)
    dispatch_put_kernel(const __grid_constant__ PutParams params) {
  extern __shared__ __align__(16) uint8_t put_table[];
  PutRows<kWords, kAligned> rows(params);
  RouteTable<kWords> table(params.dispatch, params.table, put_table);
  dispatch_in_place(params.dispatch, params.table, table, rows);
}

}  // namespace moe_ep::one_sided
