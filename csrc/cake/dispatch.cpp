// Dispatch between CPU ranks: each source writes its rows straight into the segments of their
// owners.
//
// Order of a round, per region: the payload, id, weight, statistics and header regions of a
// destination are written by the sources before they signal `dispatched`, and read by the
// destination after its wait. They are written again in the next round, which a source enters only
// after its wait in combine, which the destination's combine signal satisfies after it read them.
#include <algorithm>
#include <cstring>

#include "cake/copy_row.h"
#include "cake/cpu.h"
#include "cake/segment.h"
#include "cake/wait_for_peers.h"
#include "core/expert_partition.h"

namespace moe_ep::cake {
namespace {

// Numbers the rows of each destination, in token order.
class Router {
 public:
  Router(const DispatchParams& p, Segment own)
      : p_(p),
        own_(own),
        partition_(p.workspace.geometry.num_experts, p.workspace.geometry.ep_size) {}

  // Fills the send slots of all tokens and returns how many rows go to each rank.
  void route(int32_t* rows_to) const {
    const Geometry& g = p_.workspace.geometry;
    std::fill_n(rows_to, g.ep_size, 0);
    own_.control().invalid_id.count = 0;
    for (int32_t token = 0; token < p_.num_tokens; ++token) {
      const RankMask destinations = destinations_of(token);
      SendSlot* slot = own_.send_slots() + static_cast<int64_t>(token) * g.max_destinations();
      SendSlot* const end = slot + g.max_destinations();
      for (int32_t word = 0; word < rank_mask_words(g.ep_size); ++word) {
        for (uint64_t bits = destinations.words[word]; bits != 0; bits &= bits - 1) {
          const int32_t rank = word * kRanksPerMaskWord + __builtin_ctzll(bits);
          *slot++ = {rank, rows_to[rank]++};
        }
      }
      if (slot != end) *slot = {-1, 0};
    }
  }

  // An id as the receivers see it: what lies outside [0, num_experts) arrives as the invalid id.
  int32_t id_to_send(int32_t token, int32_t slot) const {
    const int64_t expert = expert_id(token, slot);
    return static_cast<int32_t>(partition_.contains(expert) ? expert : p_.invalid_expert_id);
  }

 private:
  RankMask destinations_of(int32_t token) const {
    RankMask destinations;
    for (int32_t slot = 0; slot < p_.workspace.geometry.top_k; ++slot) {
      const int64_t expert = expert_id(token, slot);
      if (partition_.contains(expert)) {
        const int32_t owner = partition_.owner_of(static_cast<int32_t>(expert));
        if (p_.active.contains(owner)) destinations.insert(owner);
      } else if (expert >= 0 && expert != p_.invalid_expert_id) {
        record_invalid(token, slot, expert);
      }
    }
    return destinations;
  }

  int64_t expert_id(int32_t token, int32_t slot) const {
    const int64_t i = static_cast<int64_t>(token) * p_.workspace.geometry.top_k + slot;
    return p_.ids_are_int64 ? static_cast<const int64_t*>(p_.topk_ids)[i]
                            : static_cast<const int32_t*>(p_.topk_ids)[i];
  }

  void record_invalid(int32_t token, int32_t slot, int64_t expert) const {
    InvalidIdRecord& record = own_.control().invalid_id;
    if (record.count++ == 0) {
      record.token = token;
      record.slot = slot;
      record.expert_id = expert;
    }
  }

  const DispatchParams& p_;
  Segment own_;
  ExpertPartition partition_;
};

class RowSender {
 public:
  RowSender(const DispatchParams& p, const WorkspaceLayout& layout, const Router& router)
      : p_(p), layout_(layout), router_(router), copy_row_(bytes_to_copy(p)) {
    int64_t row_bytes[kMaxPayloads] = {};
    for (int32_t i = 0; i < p.num_payloads; ++i) row_bytes[i] = p.payloads[i].row_bytes;
    placement_ =
        PayloadPlacement::of(p.workspace.geometry, p.tokens_per_rank, row_bytes, p.num_payloads);
  }

  void send(int64_t begin, int64_t end) const {
    for (int64_t token = begin; token < end; ++token) send(token);
    copy_row_.finish();
  }

 private:
  static int64_t bytes_to_copy(const DispatchParams& p) {
    int64_t row_bytes = 0;
    for (int32_t i = 0; i < p.num_payloads; ++i) row_bytes += p.payloads[i].row_bytes;
    return bytes_of_round(p.workspace.geometry.ep_size, p.tokens_per_rank, row_bytes);
  }

  void send(int64_t token) const {
    const Geometry& g = p_.workspace.geometry;
    const Segment own(p_.workspace, layout_, p_.workspace.ep_rank);
    const SendSlot* slots = own.send_slots() + token * g.max_destinations();
    const auto top_k = static_cast<size_t>(g.top_k);
    int32_t ids[kMaxTopK];
    for (int32_t k = 0; k < g.top_k; ++k) {
      ids[k] = router_.id_to_send(static_cast<int32_t>(token), k);
    }
    for (int32_t i = 0; i < g.max_destinations() && slots[i].rank >= 0; ++i) {
      const Segment peer(p_.workspace, layout_, slots[i].rank);
      const int64_t row =
          static_cast<int64_t>(p_.workspace.ep_rank) * p_.tokens_per_rank + slots[i].row;
      std::memcpy(peer.topk_ids() + row * g.top_k, ids, top_k * sizeof(int32_t));
      if (p_.has_weights) {
        std::memcpy(peer.topk_weights() + row * g.top_k, p_.topk_weights + token * g.top_k,
                    top_k * sizeof(float));
      }
      for (int32_t j = 0; j < p_.num_payloads; ++j) {
        const RowsIn& rows = p_.payloads[j];
        copy_row_(peer.payload_row(placement_, j, row), rows.data + token * rows.stride,
                  rows.row_bytes);
      }
    }
  }

  const DispatchParams& p_;
  const WorkspaceLayout& layout_;
  const Router& router_;
  RowCopy copy_row_;
  PayloadPlacement placement_;
};

void publish(const DispatchParams& p, const WorkspaceLayout& layout, uint32_t epoch,
             const int32_t* rows_to) {
  const Geometry& g = p.workspace.geometry;
  for (int32_t peer = 0; peer < g.ep_size; ++peer) {
    if (!p.active.contains(peer)) continue;
    const Segment segment(p.workspace, layout, peer);
    if (p.eplb_local_stats != nullptr) {
      std::memcpy(segment.eplb_stats() +
                      static_cast<int64_t>(p.workspace.ep_rank) * g.eplb_stats_num_experts,
                  p.eplb_local_stats,
                  static_cast<size_t>(g.eplb_stats_num_experts) * sizeof(int32_t));
    }
    RoundHeader& header = segment.round_header(p.workspace.ep_rank);
    header.num_rows = rows_to[peer];
    header.tokens_per_rank = p.tokens_per_rank;
    header.has_weights = p.has_weights;
    header.has_stats = p.eplb_local_stats != nullptr;
    header.num_payloads = p.num_payloads;
    for (int32_t i = 0; i < kMaxPayloads; ++i) {
      header.row_bytes[i] = i < p.num_payloads ? p.payloads[i].row_bytes : 0;
    }
    signal(&header.dispatched, epoch, &segment.control().sleepers);
  }
}

bool same_round(const RoundHeader& a, const RoundHeader& b) {
  return a.tokens_per_rank == b.tokens_per_rank && a.has_weights == b.has_weights &&
         a.has_stats == b.has_stats && a.num_payloads == b.num_payloads &&
         std::equal(a.row_bytes, a.row_bytes + kMaxPayloads, b.row_bytes);
}

bool headers_agree(const DispatchParams& p, const Segment& own) {
  const RoundHeader& mine = own.round_header(p.workspace.ep_rank);
  for (int32_t source = 0; source < p.workspace.geometry.ep_size; ++source) {
    if (p.active.contains(source) && !same_round(own.round_header(source), mine)) return false;
  }
  return true;
}

template <typename T>
void copy_unless_there(const T* from, int64_t count, T* to) {
  if (from != to) std::copy_n(from, count, to);
}

// Brings ids, weights and statistics to where they are wanted, if they are not there already, and
// gives the rows without a token the invalid id.
void receive(const DispatchParams& p, const Segment& own) {
  const Geometry& g = p.workspace.geometry;
  for (int32_t source = 0; source < g.ep_size; ++source) {
    const bool active = p.active.contains(source);
    const int32_t num_rows = active ? own.round_header(source).num_rows : 0;
    const int64_t first = static_cast<int64_t>(source) * p.tokens_per_rank * g.top_k;
    const int64_t used = static_cast<int64_t>(num_rows) * g.top_k;
    const int64_t all = static_cast<int64_t>(p.tokens_per_rank) * g.top_k;
    copy_unless_there(own.topk_ids() + first, used, p.out_topk_ids + first);
    std::fill(p.out_topk_ids + first + used, p.out_topk_ids + first + all,
              static_cast<int32_t>(p.invalid_expert_id));
    if (p.out_topk_weights != nullptr) {
      copy_unless_there(own.topk_weights() + first, used, p.out_topk_weights + first);
      std::fill(p.out_topk_weights + first + used, p.out_topk_weights + first + all, 0.0f);
    }
    p.out_recv_counts[source] = num_rows;
    if (p.out_eplb_stats != nullptr) {
      const int64_t begin = static_cast<int64_t>(source) * g.eplb_stats_num_experts;
      if (active) {
        copy_unless_there(own.eplb_stats() + begin, g.eplb_stats_num_experts,
                          p.out_eplb_stats + begin);
      } else {
        std::fill_n(p.out_eplb_stats + begin, g.eplb_stats_num_experts, 0);
      }
    }
  }
}

// All ranks see the same headers, so all come here together. They meet once more, so that none
// starts the next round, and writes new headers, while another still reads those of this one.
Outcome close_round(const DispatchParams& p, const WorkspaceLayout& layout, const Segment& own,
                    Deadline deadline) {
  ControlBlock& control = own.control();
  control.phase = Phase::kIdle;
  for (int32_t source = 0; source < p.workspace.geometry.ep_size; ++source) {
    if (p.active.contains(source)) p.out_headers[source] = own.round_header(source);
  }
  for (int32_t peer = 0; peer < p.workspace.geometry.ep_size; ++peer) {
    if (!p.active.contains(peer)) continue;
    const Segment segment(p.workspace, layout, peer);
    signal(&segment.combine_flag(p.workspace.ep_rank).ready, control.epoch,
           &segment.control().sleepers);
  }
  const Outcome met =
      wait_for_peers(p.workspace, p.active, control, Phase::kDispatch, p.timeout_sec, deadline,
                     [&](int32_t peer) { return &own.combine_flag(peer).ready; });
  return met == Outcome::kDone ? Outcome::kDisagreement : met;
}

}  // namespace

Outcome dispatch(const DispatchParams& p, const ParallelFor& parallel_for) {
  const WorkspaceLayout layout = WorkspaceLayout::of(p.workspace.geometry);
  const Segment own(p.workspace, layout, p.workspace.ep_rank);
  ControlBlock& control = own.control();
  control.epoch += 1;
  control.phase = Phase::kDispatch;
  control.num_tokens = p.num_tokens;
  control.tokens_per_rank = p.tokens_per_rank;
  control.active = p.active;

  int32_t rows_to[kMaxEpSize];
  const Router router(p, own);
  router.route(rows_to);

  const RowSender sender(p, layout, router);
  constexpr int64_t kTokensPerChunk = 16;  // a chunk is worth handing to another thread
  parallel_for(0, p.num_tokens, kTokensPerChunk,
               [&](int64_t begin, int64_t end) { sender.send(begin, end); });

  publish(p, layout, control.epoch, rows_to);
  const Deadline deadline = deadline_in(p.timeout_sec);
  const Outcome met =
      wait_for_peers(p.workspace, p.active, control, Phase::kDispatch, p.timeout_sec, deadline,
                     [&](int32_t peer) { return &own.round_header(peer).dispatched; });
  if (met != Outcome::kDone) return met;
  if (!headers_agree(p, own)) return close_round(p, layout, own, deadline);
  receive(p, own);
  return Outcome::kDone;
}

}  // namespace moe_ep::cake
