// The rows of dispatch: out of the tokens' tensors, through the FIFOs, into the receiver's tensors.
// A record is a token's rows of all fields, one behind the other.
#include <algorithm>
#include <cstring>
#include <vector>

#include "transport/copy_row.h"
#include "transport/huge_pages.h"
#include "two_sided/cpu.h"
#include "two_sided/exchange.h"
#include "two_sided/fifo.h"

namespace moe_ep::two_sided {
namespace {

int64_t record_bytes_of(const AlltoallvParams& p) {
  int64_t bytes = 0;
  for (int32_t i = 0; i < p.num_fields; ++i) bytes += p.rows[i].row_bytes;
  return bytes;
}

class DispatchRows {
 public:
  DispatchRows(const AlltoallvParams& p, const FifoLayout& layout, const Segment& own)
      : p_(p),
        copy_row_(
            bytes_of_round(p.workspace.geometry.ep_size, p.tokens_per_rank, record_bytes_of(p))),
        own_count_(own.send_counts()[p.workspace.ep_rank]) {
    const Geometry& g = p.workspace.geometry;
    const int64_t record_bytes = record_bytes_of(p);
    const int32_t* tokens = p.send_tokens;
    for (int32_t rank = 0; rank < g.ep_size; ++rank) {
      tokens_for_[rank] = tokens;
      tokens += own.send_counts()[rank];
    }
    for (int32_t distance = 1; distance < g.ep_size; ++distance) {
      const int32_t to = peer_at(p.workspace, distance);
      const int32_t from = peer_at(p.workspace, g.ep_size - distance);
      to_.push_back({to, Sender(p.workspace, layout, to,
                                Pieces(own.send_counts()[to], record_bytes, g.slot_bytes))});
      from_.push_back(
          {from, Receiver(p.workspace, layout, from,
                          Pieces(own.recv_counts()[from], record_bytes, g.slot_bytes))});
    }
  }

  bool step() {
    bool moved = false;
    for (Outgoing& out : to_) {
      const int32_t* tokens = tokens_for_[out.peer];
      moved |= out.stream.push([&](int64_t record, int64_t begin, int64_t bytes, uint8_t* to) {
        gather(tokens[record], begin, bytes, to);
      });
    }
    // Here, when the peers have something to do meanwhile.
    if (!own_rows_are_copied_) copy_own_rows();
    for (Incoming& in : from_) {
      const int64_t first = static_cast<int64_t>(in.peer) * p_.tokens_per_rank;
      while (const uint8_t* bytes = in.stream.arrived()) {
        const Pieces& piece = in.stream.piece();
        scatter(first + piece.record(), piece.begin(), piece.bytes(), bytes);
        in.stream.take();
        moved = true;
      }
      in.stream.tell_sender();
    }
    return moved;
  }

  bool is_done() const {
    return std::ranges::all_of(to_, [](const Outgoing& out) { return out.stream.is_done(); }) &&
           std::ranges::all_of(from_, [](const Incoming& in) { return in.stream.is_done(); });
  }

  template <typename Visit>
  void for_each_awaited(Visit visit) const {
    for (const Incoming& in : from_) {
      if (!in.stream.is_done()) visit(in.peer);
    }
    for (const Outgoing& out : to_) {
      if (!out.stream.is_done()) visit(out.peer);
    }
  }

  // Makes the rows visible to other threads of this process.
  void finish() const { copy_row_.finish(); }

 private:
  struct Outgoing {
    int32_t peer;
    Sender stream;
  };
  struct Incoming {
    int32_t peer;
    Receiver stream;
  };

  // Calls visit(field, begin, bytes, offset) for each field that has a part in bytes [begin, begin
  // + bytes) of a record: which bytes of its row, and where they are in the piece.
  template <typename Visit>
  void for_each_field(int64_t begin, int64_t bytes, Visit visit) const {
    const int64_t end = begin + bytes;
    int64_t field_begin = 0;
    for (int32_t i = 0; i < p_.num_fields; ++i) {
      const int64_t field_end = field_begin + p_.rows[i].row_bytes;
      const int64_t from = std::max(begin, field_begin);
      const int64_t to = std::min(end, field_end);
      if (from < to) visit(i, from - field_begin, to - from, from - begin);
      field_begin = field_end;
    }
  }

  void gather(int64_t token, int64_t begin, int64_t bytes, uint8_t* to) const {
    for_each_field(begin, bytes, [&](int32_t i, int64_t from, int64_t count, int64_t offset) {
      // Through the caches, where the receiver finds it: a FIFO is small.
      std::memcpy(to + offset, p_.rows[i].data + token * p_.rows[i].stride + from,
                  static_cast<size_t>(count));
    });
  }

  void scatter(int64_t row, int64_t begin, int64_t bytes, const uint8_t* from) const {
    for_each_field(begin, bytes, [&](int32_t i, int64_t to, int64_t count, int64_t offset) {
      copy_row_(p_.received[i] + row * p_.rows[i].row_bytes + to, from + offset, count);
    });
  }

  void copy_own_rows() {
    const int64_t first = static_cast<int64_t>(p_.workspace.ep_rank) * p_.tokens_per_rank;
    const int32_t* tokens = tokens_for_[p_.workspace.ep_rank];
    for (int64_t i = 0; i < own_count_; ++i) {
      for (int32_t f = 0; f < p_.num_fields; ++f) {
        const RowsIn& rows = p_.rows[f];
        copy_row_(p_.received[f] + (first + i) * rows.row_bytes,
                  rows.data + tokens[i] * rows.stride, rows.row_bytes);
      }
    }
    own_rows_are_copied_ = true;
  }

  const AlltoallvParams& p_;
  RowCopy copy_row_;
  int64_t own_count_;
  const int32_t* tokens_for_[kMaxEpSize] = {};
  std::vector<Outgoing> to_;
  std::vector<Incoming> from_;
  bool own_rows_are_copied_ = false;
};

}  // namespace

Outcome alltoallv(const AlltoallvParams& p) {
  const Geometry& g = p.workspace.geometry;
  const FifoLayout layout = FifoLayout::of(g);
  const Segment own(p.workspace, layout, p.workspace.ep_rank);
  own.round_state().rows_delivered = 1;
  for (int32_t i = 0; i < p.num_fields; ++i) {
    const int64_t num_rows = static_cast<int64_t>(g.ep_size) * p.tokens_per_rank;
    ask_for_huge_pages(p.received[i], num_rows * p.rows[i].row_bytes);
  }
  DispatchRows rows(p, layout, own);
  const Outcome outcome = exchange(PeerWait{g.ep_size, RankMask::all(g.ep_size), Phase::kDispatch,
                                            p.timeout_sec, p.workspace.interrupted},
                                   p.workspace.ep_rank, own, rows, [&](int32_t peer) -> auto& {
                                     return Segment(p.workspace, layout, peer).control();
                                   });
  rows.finish();
  return outcome;
}

}  // namespace moe_ep::two_sided
