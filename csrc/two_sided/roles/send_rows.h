// combine, a warp at some of the peers: sends the experts' rows back to their sources.
//
// It waits for none of them alone: whatever FIFO has room is filled, so that a source that waits
// for a certain row gets it (sum_tokens.h).
//
// While rows are loading, those before them are on their way out: one fence is behind both, and
// behind the look for room. Rows that were loaded for a source that has none are given up as soon
// as another one has.
#pragma once

#include <cstdint>

#include "two_sided/roles/peer_rows.h"

namespace moe_ep::two_sided {

// Machine: load_rows(item, source, row, count) begins to bring the parts of `count` rows of a
// source's block here, from `row` on; store_rows(item, source, row, count, slot) brings them to a
// slot.
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
  // Rows for one slot.
  struct Rows {
    int32_t source;  // -1: none
    int32_t row;
    int32_t count;
    uint32_t head;
    bool has_room;
  };

  MOE_EP_ON_DEVICE bool send(const Item& item) {
    rows_.begin(c_, item);
    int32_t held = -1;  // the source whose rows are loaded
    int32_t last = -1;  // the one that got the last ones
    bool is_due = false;
    for (;;) {
      bool is_left[kWords];
      bool is_ready[kWords];
      for (int w = 0; w < kWords; ++w) {
        is_left[w] = rows_.is_left(w);
        is_ready[w] = is_left[w] && has_room(head_[w], tail_[w], c_.num_slots());
      }
      const int32_t ready = rank_behind(m_, is_ready, last);
      const int32_t next = ready >= 0 ? ready : held >= 0 ? held : rank_behind(m_, is_left, last);
      const Rows rows = rows_for(next);
      if (next != held) {
        if (held >= 0) m_.drop_load();
        m_.load_rows(item, next, rows.row, rows.count);
      }
      held = next;
      for (int w = 0; w < kWords; ++w) {
        if (is_left[w] && !is_ready[w]) tail_[w] = m_.peek(c_.tail_from(rows_.rank(w)));
      }
      m_.fence();
      if (is_due) publish(last);
      is_due = false;
      if (next < 0) return true;
      if (!rows_for(next).has_room) {
        if (!m_.counts_to_look() || !m_.has_run_out(next)) continue;
        m_.drop_load();
        return false;
      }
      m_.moved();
      m_.sync();  // what one lane has seen, all see
      m_.store_rows(item, next, rows.row, rows.count, c_.slot_at(next, rows.head));
      m_.sync();
      is_due = true;
      last = next;
      held = -1;
      for (int w = 0; w < kWords; ++w) {
        if (rows_.rank(w) != next) continue;
        ++head_[w];
        rows_.advance(w, rows.count);
      }
    }
  }

  MOE_EP_ON_DEVICE void publish(int32_t source) {
    for (int w = 0; w < kWords; ++w) {
      if (rows_.rank(w) == source) m_.post(c_.head_at(source), head_[w]);
    }
  }

  // The next ones for a source.
  MOE_EP_ON_DEVICE Rows rows_for(int32_t source) {
    Rows rows{source, 0, 0, 0, false};
    for (int w = 0; w < kWords; ++w) {
      if (source < 0 || source / Machine::kLanes != w) continue;
      const int32_t lane = source % Machine::kLanes;
      rows.row = m_.from_lane(rows_.next(w), lane);
      rows.count = m_.from_lane(rows_.in_slot(c_, w), lane);
      rows.head = m_.from_lane(head_[w], lane);
      rows.has_room = has_room(rows.head, m_.from_lane(tail_[w], lane), c_.num_slots());
    }
    return rows;
  }

  Machine& m_;
  const Channel& c_;
  PeerRows<Machine, kWords> rows_;
  uint32_t head_[kWords];  // slots that were filled, also if that is not yet published
  uint32_t tail_[kWords];  // as last seen
};

}  // namespace moe_ep::two_sided
