// combine, a warp at some of the peers: sends the experts' rows back to their sources.
//
// It waits for none of them alone: whatever FIFO has room is filled, so that a source that waits
// for a certain row gets it (sum_tokens.h).
#pragma once

#include <cstdint>

#include "two_sided/roles/peer_rows.h"

namespace moe_ep::two_sided {

// Machine: send_rows(item, source, row, count, slot) brings the parts of `count` rows of a source's
// block, from `row` on, to a slot.
template <typename Machine, int kWords>
class RowSender {
 public:
  // warp: which of those at the peers.
  MOE_EP_ON_DEVICE RowSender(Machine& m, const Channel& c, const CtaShape& shape, int32_t warp)
      : m_(m), c_(c), rows_(c, shape, warp) {
    for (int w = 0; w < kWords; ++w) {
      head_[w] = rows_.is_mine(w) ? *c.own().sent(rows_.rank(w), c.number) : 0;
      tail_[w] = rows_.is_mine(w) ? m.poll(c.tail_from(rows_.rank(w))) : 0;
    }
  }

  // False: a wait has expired.
  MOE_EP_ON_DEVICE bool run() {
    if (!for_each_item(c_, [&](const Item& item) { return send(item); })) return false;
    for (int w = 0; w < kWords; ++w) {
      if (rows_.is_mine(w)) *c_.own().sent(rows_.rank(w), c_.number) = head_[w];
    }
    return true;
  }

 private:
  MOE_EP_ON_DEVICE bool send(const Item& item) {
    rows_.begin(c_, item);
    for (;;) {
      bool is_left[kWords];
      bool any_had_room = false;
      for (int w = 0; w < kWords; ++w) {
        is_left[w] = rows_.is_left(w);
        if (is_left[w] && !has_room(head_[w], tail_[w], c_.num_slots())) {
          tail_[w] = m_.poll(c_.tail_from(rows_.rank(w)));
        }
        const bool can_send = is_left[w] && has_room(head_[w], tail_[w], c_.num_slots());
        const uint32_t free = m_.ballot(can_send);
        any_had_room |= free != 0;
        m_.sync();  // what one lane has seen, all see
        for (uint32_t bits = free; bits != 0; bits &= bits - 1) fill(item, m_.lowest(bits), w);
        m_.sync();
        if (!can_send) continue;
        m_.publish(c_.head_at(rows_.rank(w)), ++head_[w]);  // one fence for all
        rows_.advance(w, rows_.in_slot(c_, w));
      }
      const int32_t peer = first_rank(m_, is_left);
      if (peer < 0) return true;
      if (any_had_room) {
        m_.moved();
      } else if (m_.counts_to_look() && m_.has_run_out(peer)) {
        return false;
      }
    }
  }

  // The slot for the rank of one lane and word.
  MOE_EP_ON_DEVICE void fill(const Item& item, int32_t lane, int word) {
    const int32_t source = rank_of<Machine>(lane, word);
    const int32_t row = m_.from_lane(rows_.next(word), lane);
    const int32_t count = m_.from_lane(rows_.in_slot(c_, word), lane);
    const uint32_t head = m_.from_lane(head_[word], lane);
    m_.send_rows(item, source, row, count, c_.slot_at(source, head));
  }

  Machine& m_;
  const Channel& c_;
  PeerRows<Machine, kWords> rows_;
  uint32_t head_[kWords];
  uint32_t tail_[kWords];  // as last seen
};

}  // namespace moe_ep::two_sided
