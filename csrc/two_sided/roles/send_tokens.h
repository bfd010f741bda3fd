// alltoallv, the warp at the tokens: sends the records of a channel's items to their owners.
//
// It waits for room at all owners of a token, so that it loads a record once. It may: every FIFO of
// the channel is emptied, whatever the others are full of (receive_slots.h).
//
// While a record is loading, the one before it is on its way out: one fence is behind both. That
// one is published before this warp waits for anything.
#pragma once

#include <cstdint>

#include "two_sided/roles/token_walk.h"

namespace moe_ep::two_sided {

// Machine: load_record(item, token) begins to bring a part of a token's record here;
// store_record(item, token, places, count, own_row) brings it to `count` places, and, if own_row is
// not negative, to that row of this rank's own block.
template <typename Machine, int kWords>
class TokenSender {
 public:
  MOE_EP_ON_DEVICE TokenSender(Machine& m, const Channel& c) : m_(m), c_(c) {
    for (int w = 0; w < kWords; ++w) {
      const int32_t rank = rank_of<Machine>(m.lane(), w);
      head_[w] = tail_[w] = 0;
      is_due_[w] = false;
      if (!is_peer(rank)) continue;
      head_[w] = *c.own().sent(rank, c.number);
      tail_[w] = m.poll(c.tail_from(rank));
    }
  }

  // False: a wait has expired.
  MOE_EP_ON_DEVICE bool run() {
    if (!for_each_item(c_, [&](const Item& item) { return send(item); })) return false;
    for (int w = 0; w < kWords; ++w) {
      const int32_t rank = rank_of<Machine>(m_.lane(), w);
      if (is_peer(rank)) *c_.own().sent(rank, c_.number) = head_[w];
    }
    return true;
  }

 private:
  using Walk = TokenWalk<Machine, kWords>;

  MOE_EP_ON_DEVICE bool is_peer(int32_t rank) const {
    return rank < c_.ep_size() && rank != c_.workspace.ep_rank;
  }
  MOE_EP_ON_DEVICE bool sends(const Walk& walk, int word, int32_t token) const {
    return walk.has(word, token) && rank_of<Machine>(m_.lane(), word) != c_.workspace.ep_rank;
  }

  MOE_EP_ON_DEVICE bool send(const Item& item) {
    Walk walk(m_, c_, item);
    for (int w = 0; w < kWords; ++w) place_[w] = 0;
    for (;;) {
      const int32_t token = walk.first_token(m_);
      const bool is_left = token != kNoToken;
      if (is_left) {
        walk.look_ahead(token);
        look_for_room(walk, token);
        m_.load_record(item, token);
      }
      publish();
      if (!is_left) return true;
      if (!await_room(walk, token)) {
        m_.drop_load();
        return false;
      }
      const int32_t count = list_places(walk, item, token);
      m_.store_record(item, token, m_.row_list(), count, own_row(walk, token));
      m_.sync();
      fill(walk, token);
      walk.advance(token);
    }
  }

  MOE_EP_ON_DEVICE bool is_full(const Walk& walk, int word, int32_t token) const {
    return sends(walk, word, token) && place_[word] == 0 &&
           !has_room(head_[word], tail_[word], c_.num_slots());
  }
  // Before a fence.
  MOE_EP_ON_DEVICE void look_for_room(const Walk& walk, int32_t token) {
    for (int w = 0; w < kWords; ++w) {
      if (!is_full(walk, w, token)) continue;
      tail_[w] = m_.peek(c_.tail_from(rank_of<Machine>(m_.lane(), w)));
    }
  }

  MOE_EP_ON_DEVICE bool await_room(const Walk& walk, int32_t token) {
    for (;;) {
      bool waits[kWords];
      for (int w = 0; w < kWords; ++w) waits[w] = is_full(walk, w, token);
      const int32_t peer = first_rank(m_, waits);
      if (peer < 0) break;
      if (m_.counts_to_look() && m_.has_run_out(peer)) return false;
      for (int w = 0; w < kWords; ++w) {
        if (waits[w]) tail_[w] = m_.poll(c_.tail_from(rank_of<Machine>(m_.lane(), w)));
      }
    }
    m_.moved();
    return true;
  }

  // In row_list; returns how many there are.
  MOE_EP_ON_DEVICE int32_t list_places(const Walk& walk, const Item& item, int32_t token) {
    int32_t count = 0;
    for (int w = 0; w < kWords; ++w) {
      const bool is_one = sends(walk, w, token);
      const uint32_t bits = m_.ballot(is_one);
      if (is_one) {
        m_.row_list()[count + m_.count(bits & ((uint32_t{1} << m_.lane()) - 1))] =
            c_.slot_at(rank_of<Machine>(m_.lane(), w), head_[w]) + place_[w] * item.bytes();
      }
      count += m_.count(bits);
    }
    m_.sync();  // what one lane has seen, all see
    return count;
  }

  // Of a token that stays here, too; else -1.
  MOE_EP_ON_DEVICE int32_t own_row(const Walk& walk, int32_t token) const {
    int32_t row = -1;
    for (int w = 0; w < kWords; ++w) {
      if (rank_of<Machine>(m_.lane(), w) == c_.workspace.ep_rank && walk.has(w, token)) {
        row = walk.row(w);
      }
    }
    return m_.from_lane(row, c_.workspace.ep_rank % Machine::kLanes);
  }

  // Slots that are complete are due.
  MOE_EP_ON_DEVICE void fill(const Walk& walk, int32_t token) {
    for (int w = 0; w < kWords; ++w) {
      if (!sends(walk, w, token)) continue;
      ++place_[w];
      if (place_[w] < c_.plan.records_per_slot && !walk.is_last(w)) continue;
      place_[w] = 0;
      ++head_[w];
      is_due_[w] = true;
    }
  }
  MOE_EP_ON_DEVICE void publish() {
    m_.fence();
    for (int w = 0; w < kWords; ++w) {
      if (is_due_[w]) m_.post(c_.head_at(rank_of<Machine>(m_.lane(), w)), head_[w]);
      is_due_[w] = false;
    }
  }

  Machine& m_;
  const Channel& c_;
  uint32_t head_[kWords];  // slots that were filled, also if that is not yet published
  uint32_t tail_[kWords];  // as last seen
  int32_t place_[kWords];  // records in the slot at hand
  bool is_due_[kWords];
};

}  // namespace moe_ep::two_sided
