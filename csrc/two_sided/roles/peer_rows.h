// The rows that a warp at some of the peers has still to move: of an item, for each of its peers.
#pragma once

#include <cstdint>

#include "two_sided/roles/channel.h"

namespace moe_ep::two_sided {

// Of received rows: alltoallv takes them in, combine sends the experts' rows for them back. Lane l
// stands for ranks l, l + kLanes, ..., one a word.
template <typename Machine, int kWords>
class PeerRows {
 public:
  // warp: which of those at the peers.
  MOE_EP_ON_DEVICE PeerRows(const Channel& c, const CtaShape& shape, int32_t warp) {
    for (int w = 0; w < kWords; ++w) {
      is_mine_[w] = rank(w) < c.ep_size() && rank(w) != c.workspace.ep_rank &&
                    warp_of_peer(rank(w), c.workspace.ep_rank, c.ep_size(), shape) == warp;
    }
  }

  MOE_EP_ON_DEVICE void begin(const Channel& c, const Item& item) {
    for (int w = 0; w < kWords; ++w) {
      row_[w] = end_[w] = 0;
      if (!is_mine_[w]) continue;
      const int32_t* const bounds = c.own().recv_bounds(rank(w));
      row_[w] = bounds[item.first_bound];
      end_[w] = bounds[item.end_bound];
    }
  }

  // Of this lane's rank in a word.
  MOE_EP_ON_DEVICE static int32_t rank(int word) { return rank_of<Machine>(Machine::lane(), word); }
  MOE_EP_ON_DEVICE bool is_mine(int word) const { return is_mine_[word]; }
  MOE_EP_ON_DEVICE bool is_left(int word) const { return row_[word] < end_[word]; }
  MOE_EP_ON_DEVICE int32_t next(int word) const { return row_[word]; }
  // How many lie in its next slot.
  MOE_EP_ON_DEVICE int32_t in_slot(const Channel& c, int word) const {
    const int32_t left = end_[word] - row_[word];
    return left < c.plan.records_per_slot ? left : c.plan.records_per_slot;
  }
  MOE_EP_ON_DEVICE void advance(int word, int32_t rows) { row_[word] += rows; }

 private:
  bool is_mine_[kWords];
  int32_t row_[kWords];  // the next one of the item
  int32_t end_[kWords];
};

}  // namespace moe_ep::two_sided
