// The tokens of an item, each with the ranks that have a row of it. They stand in send_tokens, in
// ascending order for each rank: so a token goes where it is the next one.
#pragma once

#include <cstdint>
#include <limits>

#include "two_sided/roles/channel.h"

namespace moe_ep::two_sided {

inline constexpr int32_t kNoToken = std::numeric_limits<int32_t>::max();

// Lane l stands for ranks l, l + kLanes, ..., one a word.
template <typename Machine, int kWords>
class TokenWalk {
 public:
  MOE_EP_ON_DEVICE TokenWalk(Machine& m, const Channel& c, const Item& item) {
    const Segment own = c.own();
    for (int w = 0; w < kWords; ++w) {
      const int32_t rank = rank_of<Machine>(m.lane(), w);
      row_[w] = end_[w] = 0;
      list_[w] = c.send_tokens;
      if (rank < c.ep_size()) {
        const int32_t* const bounds = own.send_bounds(rank);
        row_[w] = bounds[item.first_bound];
        end_[w] = bounds[item.end_bound];
        list_[w] += own.list_begins()[rank];
      }
      next_[w] = after_[w] = token_at(w, row_[w]);
    }
  }

  // That is left on any rank's list; kNoToken: none.
  MOE_EP_ON_DEVICE int32_t first_token(Machine& m) const {
    int32_t least = next_[0];
    for (int w = 1; w < kWords; ++w) least = next_[w] < least ? next_[w] : least;
    return m.least(least);
  }
  // Of this lane's rank in a word.
  MOE_EP_ON_DEVICE bool has(int word, int32_t token) const { return next_[word] == token; }
  MOE_EP_ON_DEVICE int32_t row(int word) const { return row_[word]; }
  MOE_EP_ON_DEVICE bool is_last(int word) const { return row_[word] + 1 == end_[word]; }

  // Sends the loads of what comes behind the token on their way.
  MOE_EP_ON_DEVICE void look_ahead(int32_t token) {
    for (int w = 0; w < kWords; ++w) {
      if (has(w, token)) after_[w] = token_at(w, row_[w] + 1);
    }
  }
  MOE_EP_ON_DEVICE void advance(int32_t token) {
    for (int w = 0; w < kWords; ++w) {
      if (!has(w, token)) continue;
      next_[w] = after_[w];
      ++row_[w];
    }
  }

 private:
  MOE_EP_ON_DEVICE int32_t token_at(int word, int32_t row) const {
    return row < end_[word] ? list_[word][row] : kNoToken;
  }

  int32_t next_[kWords];
  int32_t after_[kWords];  // behind `next_`, once it was looked for
  int32_t row_[kWords];
  int32_t end_[kWords];
  const int32_t* list_[kWords];
};

}  // namespace moe_ep::two_sided
