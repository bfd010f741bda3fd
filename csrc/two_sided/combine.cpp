// The rows of the experts on their way back, and their sums.
//
// Every owner sends the rows of a source in the order of its tokens, so the source forms the sums
// token by token, out of the slots, and holds no row longer than that. It needs the next row of
// each owner of the token at hand. That row comes, whatever the other FIFOs are full of: each rank
// fills every FIFO that has room, and the FIFO whose row is missing here is empty.
#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "transport/agreement.h"
#include "transport/reduce_rows.h"
#include "two_sided/cpu.h"
#include "two_sided/exchange.h"
#include "two_sided/fifo.h"

namespace moe_ep::two_sided {
namespace {

class CombineRows {
 public:
  CombineRows(const CombineParams& p, const FifoLayout& layout, const Segment& own)
      : p_(p), row_bytes_(p.hidden_size * row_type_bytes(p.row_type)) {
    const Geometry& g = p.workspace.geometry;
    const int32_t* tokens = p.send_tokens;
    owners_.reserve(static_cast<size_t>(g.ep_size));
    for (int32_t owner = 0; owner < g.ep_size; ++owner) {
      const int32_t count = own.send_counts()[owner];
      owners_.push_back({tokens, tokens + count, std::nullopt});
      tokens += count;
      if (owner == p.workspace.ep_rank) continue;
      owners_.back().stream.emplace(p.workspace, layout, owner,
                                    Pieces(count, row_bytes_, g.slot_bytes));
    }
    for (int32_t distance = 1; distance < g.ep_size; ++distance) {
      const int32_t source = peer_at(p.workspace, distance);
      sources_.push_back(
          {source, Sender(p.workspace, layout, source,
                          Pieces(own.recv_counts()[source], row_bytes_, g.slot_bytes))});
    }
  }

  bool step() {
    bool moved = false;
    for (Source& source : sources_) {
      const int64_t first = static_cast<int64_t>(source.rank) * p_.tokens_per_rank;
      moved |= source.stream.push([&](int64_t record, int64_t begin, int64_t bytes, uint8_t* to) {
        std::memcpy(to, expert_row(first + record) + begin, static_cast<size_t>(bytes));
      });
    }
    while (token_ < p_.num_tokens && sum_token()) {
      ++token_;
      moved = true;
    }
    for (Owner& owner : owners_) {
      if (owner.stream.has_value()) moved |= owner.stream->tell_sender();
    }
    return moved;
  }

  bool is_done() const {
    return token_ == p_.num_tokens && std::ranges::all_of(sources_, [](const Source& source) {
             return source.stream.is_done();
           });
  }

  template <typename Visit>
  void for_each_awaited(Visit visit) const {
    if (missing_ >= 0 && token_ < p_.num_tokens) visit(missing_);
    for (const Source& source : sources_) {
      if (!source.stream.is_done()) visit(source.rank);
    }
  }

  // What was not formed must not look like a sum.
  void poison_rest() const {
    poison_sums((p_.num_tokens - token_) * p_.hidden_size, p_.row_type,
                p_.output + token_ * row_bytes_);
  }

 private:
  struct Owner {
    const int32_t* next_token;
    const int32_t* end;
    std::optional<RecordReceiver> stream;  // none: this rank itself, whose rows are at hand
  };
  struct Source {
    int32_t rank;
    Sender stream;
  };

  const uint8_t* expert_row(int64_t row) const {
    return p_.expert_output.data + row * p_.expert_output.stride;
  }

  // Returns false where a row has not come yet.
  bool sum_token() {
    const uint8_t* rows[kMaxTopK] = {};
    int32_t with_row[kMaxTopK];
    int32_t num_rows = 0;
    for (int32_t rank = 0; rank < p_.workspace.geometry.ep_size; ++rank) {
      Owner& owner = owners_[static_cast<size_t>(rank)];
      if (owner.next_token == owner.end || *owner.next_token != token_) continue;
      rows[num_rows] = owner.stream.has_value() ? owner.stream->arrived() : next_own_row();
      if (rows[num_rows] == nullptr) {
        missing_ = rank;
        return false;
      }
      with_row[num_rows++] = rank;
    }
    reduce_rows(rows, num_rows, p_.hidden_size, p_.row_type, p_.output + token_ * row_bytes_);
    for (int32_t i = 0; i < num_rows; ++i) {
      Owner& owner = owners_[static_cast<size_t>(with_row[i])];
      ++owner.next_token;
      if (owner.stream.has_value()) {
        owner.stream->take();
      } else {
        ++own_row_;
      }
    }
    return true;
  }

  const uint8_t* next_own_row() const {
    return expert_row(static_cast<int64_t>(p_.workspace.ep_rank) * p_.tokens_per_rank + own_row_);
  }

  const CombineParams& p_;
  int64_t row_bytes_;
  std::vector<Owner> owners_;
  std::vector<Source> sources_;
  int64_t token_ = 0;  // all before it are summed
  int64_t own_row_ = 0;
  int32_t missing_ = -1;  // the owner of the row that the token at hand lacks
};

}  // namespace

Outcome combine(const CombineParams& p) {
  const Geometry& g = p.workspace.geometry;
  const FifoLayout layout = FifoLayout::of(g);
  const Segment own(p.workspace, layout, p.workspace.ep_rank);
  own.control().phase = Phase::kIdle;

  const PeerWait how{g.ep_size, RankMask::all(g.ep_size), Phase::kCombine, p.timeout_sec,
                     p.workspace.interrupted};
  const auto segment_of = [&](int32_t rank) { return Segment(p.workspace, layout, rank); };
  const Agreement agreement(how, p.workspace.ep_rank, segment_of);
  CombineFlag flag{};
  flag.row_type = static_cast<int32_t>(p.row_type);
  flag.hidden_size = p.hidden_size;
  CombineRows rows(p, layout, own);
  Outcome outcome = agreement.meet_in_combine(flag);
  if (outcome == Outcome::kDone) {
    outcome = exchange(how, p.workspace.ep_rank, own, rows,
                       [&](int32_t peer) -> auto& { return segment_of(peer).control(); });
  }
  if (outcome == Outcome::kTimeout || outcome == Outcome::kInterrupted) rows.poison_rest();
  return outcome;
}

}  // namespace moe_ep::two_sided
