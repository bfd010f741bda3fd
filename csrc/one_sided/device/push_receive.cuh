// The receives of a combine by push: waiting for the packets of a token's rows, and their sum.
#pragma once

#include <cstdint>

#include "core/device_signal.cuh"
#include "core/epoch.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/bounded_wait.cuh"
#include "one_sided/device/combine_enter.cuh"
#include "one_sided/device/packets.cuh"
#include "one_sided/device/push_round.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/token_rows.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/row_sum.cuh"

namespace moe_ep::one_sided {

// Of a token, with all their packets in flight: as many as fit into registers.
inline constexpr int kRowsAtOnce = 8;

// A piece of a token's sum.
struct PushedPiece {
  int32_t token;
  int32_t first_thread;

  __device__ static PushedPiece of(const PushCombine& c, int32_t task) {
    const int32_t token = c.by_pieces.divide(task);
    return {token, (task - token * c.shape.pieces) * kWarpSize};
  }
};

// How its packets are found. Known without a look at memory.
struct PushedPlaces {
  uint32_t packet;    // of a slot: this thread's first
  const int2* slots;  // lane j: where that of the token's row j is

  __device__ static PushedPlaces of(const PushCombine& c, int32_t task) {
    const PushedPiece piece = PushedPiece::of(c, task);
    const int32_t q = min(piece.first_thread + lane_id(), c.shape.threads - 1);
    return {static_cast<uint32_t>(c.shape.packet(q, 0)), slot_address(c.combine, piece.token)};
  }
};

// Orders nothing, so that it flies with looks at packets; these say themselves that they have come.
__device__ inline Pair look_at(const CombineFlag* flag) {
  uint64_t both;
  asm volatile("ld.relaxed.sys.global.u64 %0,[%1];" : "=l"(both) : "l"(flag) : "memory");
  return {static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32)};
}

// The rows of a token on their way here: lane j knows row j.
class PushedRows {
 public:
  int32_t count;  // the same for all lanes

  __device__ PushedRows(const CombineKernelParams& p, SendSlot slot)
      : p_(p), slot_(slot), unflagged_(lanes_with_row(slot)) {
    count = __popc(unflagged_);
  }

  // Waits for the packets of rows [first, first + kRowsAtOnce), or of those that there are, and for
  // the flags of all owners. False: an owner was called with something else, or the wait has
  // expired; the host is told. All looks of a round of the loop fly together.
  __device__ bool arrive(const PushCombine& c, uint32_t packet, uint32_t epoch, int32_t first,
                         PushPackets (&rows)[kRowsAtOnce]) {
    const DeviceSegment own = own_segment(p_.workspace);
    const uint8_t* const packets = own.combine_packets(0, 0);
    // Counted in packets, so that a row takes one register and not two.
    uint32_t at[kRowsAtOnce];
    const auto slot =
        static_cast<uint32_t>(own.push_slot(slot_.rank, slot_.row)) * c.packets_per_slot;
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      at[k] = __shfl_sync(kAllLanes, slot, (first + k) % kWarpSize) + packet;
    }
    uint32_t late = bits_below(min(count - first, kRowsAtOnce));  // rows, counted from `first`
    Patience patience;
    for (;;) {
      const bool looks = ((unflagged_ >> lane_id()) & 1) != 0;
      Pair flag{epoch - 1, 0};
      if (looks) flag = look_at(own.combine_flag(slot_.rank));
#pragma unroll
      for (int k = 0; k < kRowsAtOnce; ++k) {
        // Opaque: else the addresses of all packets are kept in registers.
        asm volatile("" : "+r"(at[k]));
        if ((late >> k) & 1) {
          rows[k].load(packets + static_cast<uint64_t>(at[k]) * PacketSlots::kPacketBytes, c.shape);
        }
      }
      uint32_t missing = 0;
#pragma unroll
      for (int k = 0; k < kRowsAtOnce; ++k) {
        if (((late >> k) & 1) && !rows[k].are_of(epoch)) missing |= 1u << k;
      }
      late = __reduce_or_sync(kAllLanes, missing);
      if (unflagged_ != 0) {
        const bool seen = looks && epoch_reached(flag.low, epoch);
        const bool foreign = seen && flag.low == epoch && flag.high != p_.signature;
        if (__any_sync(kAllLanes, foreign)) return false;
        unflagged_ &= ~__ballot_sync(kAllLanes, seen);
      }
      if ((late | unflagged_) == 0) return true;
      if (patience.counts_to_look() && expired(patience, epoch, first, late, flag.low)) {
        return false;
      }
    }
  }

 private:
  __device__ bool expired(Patience& patience, uint32_t epoch, int32_t first, uint32_t late,
                          uint32_t flag_seen) const {
    const bool by_flag = unflagged_ != 0;
    const int row = by_flag ? __ffs(static_cast<int>(unflagged_)) - 1
                            : first + __ffs(static_cast<int>(late)) - 1;
    const int32_t owner = __shfl_sync(kAllLanes, slot_.rank, row);
    // The flag may be there and a packet not: then that is of an earlier round.
    const uint32_t seen = by_flag ? __shfl_sync(kAllLanes, flag_seen, row) : epoch - 1;
    const bool now = patience.has_run_out(p_.workspace, Phase::kCombine, owner, epoch, seen);
    return __any_sync(kAllLanes, now);
  }

  const CombineKernelParams& p_;
  SendSlot slot_;
  uint32_t unflagged_;  // rows whose owner's flag has not been seen, a bit each; for all lanes
};

// The sum of a thread's chunks.
template <RowType kType>
struct PushedSum {
  float sum[kPushUnits][Chunk<kType>::kElements];

  __device__ explicit PushedSum(bool valid) {
#pragma unroll
    for (int k = 0; k < kPushUnits; ++k) start(sum[k], valid);
  }
  __device__ void add(const PushWords& words) {
#pragma unroll
    for (int k = 0; k < kPushUnits; ++k) {
      const uint2 unit = words.unit(k);
      Chunk<kType>::add(sum[k], make_uint4(unit.x, unit.y, 0, 0));  // half of it is used
    }
  }
  // scratch: 512 bytes of the warp's, not looked at if the output is aligned.
  __device__ void store(const PushCombine& c, const PushedPiece& piece, uint4* scratch) const {
    const CombineKernelParams& p = c.combine;
    uint8_t* const out = p.output + piece.token * p.row_bytes;
    const int32_t threads = min(c.shape.threads - piece.first_thread, kWarpSize);
#pragma unroll
    for (int k = 0; k < kPushUnits; ++k) {
      const int64_t begin = kPushUnitBytes * c.shape.chunk(piece.first_thread, k);
      const auto bytes =
          static_cast<int32_t>(min(p.row_bytes - begin, threads * kPushUnitBytes));
      const uint4 chunk = Chunk<kType>::round(sum[k]);
      if (p.output_is_aligned) {
        if (lane_id() * kPushUnitBytes < bytes) {
          *reinterpret_cast<uint2*>(out + begin + lane_id() * kPushUnitBytes) =
              make_uint2(chunk.x, chunk.y);
        }
      } else {
        reinterpret_cast<uint2*>(scratch)[lane_id()] = make_uint2(chunk.x, chunk.y);
        __syncwarp();
        store_elements<kType>(out + begin, scratch, bytes);
        __syncwarp();
      }
    }
  }
};

}  // namespace moe_ep::one_sided
