// combine, the warp at the tokens: sums the rows of each token out of the slots that they came in.
//
// It waits for the rows of one token after the other. It may: the row that is missing is at the
// front of a FIFO that is empty, and a FIFO with room is filled (send_rows.h).
#pragma once

#include <cstdint>

#include "two_sided/roles/token_walk.h"

namespace moe_ep::two_sided {

// Machine: own_row(item, row): where a part of an expert's row of this rank's own block lies;
// sum_rows(item, token, rows, count, free) adds a part of `count` rows in the order given, calls
// free() once none of them is needed any more, and rounds and stores the sum; poison(item, token)
// stores NaN in its place.
template <typename Machine, int kWords>
class TokenSummer {
 public:
  MOE_EP_ON_DEVICE TokenSummer(Machine& m, const Channel& c, int32_t num_tokens)
      : m_(m), c_(c), num_tokens_(num_tokens) {
    for (int w = 0; w < kWords; ++w) {
      const int32_t rank = rank_of<Machine>(m.lane(), w);
      head_[w] = tail_[w] = rank < c.ep_size() ? *c.own().taken(rank, c.number) : 0;
    }
  }

  // False: a wait has expired.
  MOE_EP_ON_DEVICE bool run() {
    bool is_good = true;
    for_each_item(c_, [&](const Item& item) {
      is_good = is_good && sum(item);
      if (!is_good) poison_from(item, next_token_);
      next_token_ = -1;
      return true;
    });
    for (int w = 0; w < kWords && is_good; ++w) {
      const int32_t rank = rank_of<Machine>(m_.lane(), w);
      if (rank < c_.ep_size()) *c_.own().taken(rank, c_.number) = tail_[w];
    }
    return is_good;
  }

  // Where sums may not be formed.
  MOE_EP_ON_DEVICE void poison_all() {
    for_each_item(c_, [&](const Item& item) {
      poison_from(item, -1);
      return true;
    });
  }

 private:
  using Walk = TokenWalk<Machine, kWords>;

  MOE_EP_ON_DEVICE int32_t token_at(int32_t bound) const {
    return token_at_bound(num_tokens_, bound, c_.plan.num_bounds);
  }
  // token: -1 for the first of the item.
  MOE_EP_ON_DEVICE void poison_from(const Item& item, int32_t token) {
    if (token < 0) token = token_at(item.first_bound);
    for (; token < token_at(item.end_bound); ++token) m_.poison(item, token);
  }
  MOE_EP_ON_DEVICE bool comes(const Walk& walk, int word, int32_t token) const {
    return walk.has(word, token) && rank_of<Machine>(m_.lane(), word) != c_.workspace.ep_rank;
  }

  MOE_EP_ON_DEVICE bool sum(const Item& item) {
    Walk walk(m_, c_, item);
    for (int w = 0; w < kWords; ++w) place_[w] = 0;
    const int32_t end = token_at(item.end_bound);
    for (next_token_ = token_at(item.first_bound); next_token_ < end; ++next_token_) {
      const int32_t token = next_token_;
      walk.look_ahead(token);
      if (!await_rows(walk, token)) return false;
      const int32_t count = list_rows(walk, item, token);
      m_.sum_rows(item, token, m_.row_list(), count, [&] {
        m_.sync();
        free_slots(walk, token);
      });
      walk.advance(token);
    }
    return true;
  }

  MOE_EP_ON_DEVICE bool await_rows(const Walk& walk, int32_t token) {
    for (;;) {
      bool is_missing[kWords];
      for (int w = 0; w < kWords; ++w) {
        is_missing[w] = comes(walk, w, token) && head_[w] == tail_[w];
        if (!is_missing[w]) continue;
        head_[w] = m_.poll(c_.head_from(rank_of<Machine>(m_.lane(), w)));
        is_missing[w] = head_[w] == tail_[w];
      }
      const int32_t peer = first_rank(m_, is_missing);
      if (peer < 0) break;
      if (m_.counts_to_look() && m_.has_run_out(peer)) return false;
    }
    m_.moved();
    return true;
  }

  // In row_list, in ascending order of the ranks; returns how many there are.
  MOE_EP_ON_DEVICE int32_t list_rows(const Walk& walk, const Item& item, int32_t token) {
    int32_t count = 0;
    for (int w = 0; w < kWords; ++w) {
      const int32_t rank = rank_of<Machine>(m_.lane(), w);
      const uint32_t bits = m_.ballot(walk.has(w, token));
      if (walk.has(w, token)) {
        const uint8_t* const row = rank == c_.workspace.ep_rank
                                       ? m_.own_row(item, walk.row(w))
                                       : c_.slot_from(rank, tail_[w]) + place_[w] * item.bytes();
        m_.row_list()[count + m_.count(bits & ((uint32_t{1} << m_.lane()) - 1))] =
            const_cast<uint8_t*>(row);
      }
      count += m_.count(bits);
    }
    m_.sync();
    return count;
  }

  // And looks for the next ones: one fence is behind both.
  MOE_EP_ON_DEVICE void free_slots(const Walk& walk, int32_t token) {
    bool is_free[kWords];
    for (int w = 0; w < kWords; ++w) {
      is_free[w] = false;
      if (!comes(walk, w, token)) continue;
      ++place_[w];
      if (place_[w] < c_.plan.records_per_slot && !walk.is_last(w)) continue;
      is_free[w] = true;
      place_[w] = 0;
      ++tail_[w];
      if (head_[w] == tail_[w]) head_[w] = m_.peek(c_.head_from(rank_of<Machine>(m_.lane(), w)));
    }
    m_.fence();
    for (int w = 0; w < kWords; ++w) {
      if (is_free[w]) m_.post(c_.tail_at(rank_of<Machine>(m_.lane(), w)), tail_[w]);
    }
  }

  Machine& m_;
  const Channel& c_;
  int32_t num_tokens_;
  int32_t next_token_ = -1;  // of the item at hand, not summed yet
  uint32_t head_[kWords];    // as last seen
  uint32_t tail_[kWords];
  int32_t place_[kWords];  // records that were taken from the slot at hand
};

}  // namespace moe_ep::two_sided
