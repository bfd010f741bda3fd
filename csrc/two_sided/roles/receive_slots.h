// alltoallv, a warp at some of the peers: empties their FIFOs into the received tensors.
//
// It waits for none of them alone: what has come is taken, so that no sender waits for room longer
// than that takes. The fence that frees a slot is also behind the look for the next ones.
#pragma once

#include <cstdint>

#include "two_sided/roles/peer_rows.h"

namespace moe_ep::two_sided {

// Machine: receive_slot(item, source, row, count, slot, free) brings `count` records to rows `row`
// and following of a source's block, and calls free() once nothing in the slot is needed any more.
template <typename Machine, int kWords>
class SlotReceiver {
 public:
  // warp: which of those at the peers.
  MOE_EP_ON_DEVICE SlotReceiver(Machine& m, const Channel& c, const CtaShape& shape, int32_t warp)
      : m_(m), c_(c), rows_(c, shape, warp) {
    for (int w = 0; w < kWords; ++w) {
      head_[w] = tail_[w] = rows_.is_mine(w) ? *c.own().taken(rows_.rank(w), c.number) : 0;
    }
  }

  // False: a wait has expired.
  MOE_EP_ON_DEVICE bool run() {
    if (!for_each_item(c_, [&](const Item& item) { return receive(item); })) return false;
    for (int w = 0; w < kWords; ++w) {
      if (rows_.is_mine(w)) *c_.own().taken(rows_.rank(w), c_.number) = tail_[w];
    }
    return true;
  }

 private:
  MOE_EP_ON_DEVICE bool receive(const Item& item) {
    rows_.begin(c_, item);
    for (;;) {
      bool is_awaited[kWords];
      for (int w = 0; w < kWords; ++w) is_awaited[w] = rows_.is_left(w);
      const int32_t peer = first_rank(m_, is_awaited);
      if (peer < 0) return true;
      uint32_t full[kWords];  // by what was seen before the last fence
      uint32_t seen[kWords];
      bool any_came = false;
      for (int w = 0; w < kWords; ++w) {
        full[w] = m_.ballot(is_awaited[w] && head_[w] != tail_[w]);
        any_came |= full[w] != 0;
        seen[w] = is_awaited[w] ? m_.peek(c_.head_from(rows_.rank(w))) : 0;
      }
      if (any_came) {
        m_.sync();  // what one lane has seen, all see
        for (int w = 0; w < kWords; ++w) {
          for (uint32_t bits = full[w]; bits != 0; bits &= bits - 1) take(item, m_.lowest(bits), w);
        }
        m_.moved();
      } else {
        m_.fence();
        if (m_.counts_to_look() && m_.has_run_out(peer)) return false;
      }
      for (int w = 0; w < kWords; ++w) {
        if (is_awaited[w]) head_[w] = seen[w];
      }
    }
  }

  // The slot that came from the rank of one lane and word. Fences.
  MOE_EP_ON_DEVICE void take(const Item& item, int32_t lane, int word) {
    const int32_t source = rank_of<Machine>(lane, word);
    const int32_t row = m_.from_lane(rows_.next(word), lane);
    const int32_t count = m_.from_lane(rows_.in_slot(c_, word), lane);
    const uint32_t tail = m_.from_lane(tail_[word], lane);
    m_.receive_slot(item, source, row, count, c_.slot_from(source, tail), [&] {
      m_.sync();
      m_.fence();
      if (m_.lane() == lane) m_.post(c_.tail_at(source), tail + 1);
    });
    if (m_.lane() != lane) return;
    ++tail_[word];
    rows_.advance(word, count);
  }

  Machine& m_;
  const Channel& c_;
  PeerRows<Machine, kWords> rows_;
  uint32_t head_[kWords];  // as last seen
  uint32_t tail_[kWords];
};

}  // namespace moe_ep::two_sided
