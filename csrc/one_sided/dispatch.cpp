// Dispatch between CPU ranks: each source writes its rows straight into the segments of their
// owners.
//
// Order of a round, per region: the payload, id, weight, statistics and header regions of a
// destination are written by the sources before they signal `dispatched`, and read by the
// destination after its wait. They are written again in the next round, which a source enters only
// after its wait in combine, which the destination's combine signal satisfies after it read them.
#include <algorithm>
#include <cstring>

#include "one_sided/cpu.h"
#include "one_sided/segment.h"
#include "transport/agreement.h"
#include "transport/copy_row.h"
#include "transport/routing.h"

namespace moe_ep::one_sided {
namespace {

// Fills the send slots of all tokens: rows are numbered for each destination, in token order.
// rows_to: how many go to each rank.
void route(const DispatchParams& p, const Segment& own, const TokenRouter& router,
           int32_t* rows_to) {
  const Geometry& g = p.workspace.geometry;
  std::fill_n(rows_to, g.ep_size, 0);
  InvalidIdRecord& invalid_id = own.control().invalid_id;
  invalid_id.count = 0;
  for (int32_t token = 0; token < p.num_tokens; ++token) {
    SendSlot* slot = own.send_slots() + static_cast<int64_t>(token) * g.max_destinations();
    SendSlot* const end = slot + g.max_destinations();
    for_each_rank(router.destinations_of(token, &invalid_id), g.ep_size,
                  [&](int32_t rank) { *slot++ = {rank, rows_to[rank]++}; });
    if (slot != end) *slot = {-1, 0};
  }
}

class RowSender {
 public:
  RowSender(const DispatchParams& p, const WorkspaceLayout& layout, const TokenRouter& router)
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
  const TokenRouter& router_;
  RowCopy copy_row_;
  PayloadPlacement placement_;
};

void send_stats(const DispatchParams& p, const WorkspaceLayout& layout) {
  if (p.eplb_local_stats == nullptr) return;
  const Geometry& g = p.workspace.geometry;
  const int64_t own_row = static_cast<int64_t>(p.workspace.ep_rank) * g.eplb_stats_num_experts;
  for (int32_t peer = 0; peer < g.ep_size; ++peer) {
    if (!p.active.contains(peer)) continue;
    const Segment segment(p.workspace, layout, peer);
    std::copy_n(p.eplb_local_stats, g.eplb_stats_num_experts, segment.eplb_stats() + own_row);
  }
}

// What must be the same on all ranks.
RoundHeader header_of(const DispatchParams& p) {
  RoundHeader header{};
  header.tokens_per_rank = p.tokens_per_rank;
  header.has_weights = p.has_weights;
  header.has_stats = p.eplb_local_stats != nullptr;
  header.num_payloads = static_cast<int16_t>(p.num_payloads);
  header.top_k = static_cast<int16_t>(p.workspace.geometry.top_k);
  header.num_experts = p.workspace.geometry.num_experts;
  for (int32_t i = 0; i < p.num_payloads; ++i) header.row_bytes[i] = p.payloads[i].row_bytes;
  return header;
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

}  // namespace

Outcome dispatch(const DispatchParams& p, const ParallelFor& parallel_for) {
  const WorkspaceLayout layout = WorkspaceLayout::of(p.workspace.geometry);
  const Segment own(p.workspace, layout, p.workspace.ep_rank);
  ControlBlock& control = own.control();
  const Sending sending(control);
  begin_round(control, p.active);
  control.phase = Phase::kDispatch;
  control.num_tokens = p.num_tokens;
  control.tokens_per_rank = p.tokens_per_rank;

  const Geometry& g = p.workspace.geometry;
  const Agreement agreement(
      PeerWait{g.ep_size, p.active, Phase::kDispatch, p.timeout_sec, p.workspace.interrupted},
      p.workspace.ep_rank, [&](int32_t rank) { return Segment(p.workspace, layout, rank); });
  if (const Outcome same = agreement.compare_masks(); same != Outcome::kDone) return same;

  int32_t rows_to[kMaxEpSize];
  const TokenRouter router({p.topk_ids, p.ids_are_int64, g.top_k, p.invalid_expert_id, p.active},
                           g.num_experts, g.ep_size);
  route(p, own, router, rows_to);

  const RowSender sender(p, layout, router);
  constexpr int64_t kTokensPerChunk = 16;  // a chunk is worth handing to another thread
  parallel_for(0, p.num_tokens, kTokensPerChunk,
               [&](int64_t begin, int64_t end) { sender.send(begin, end); });

  send_stats(p, layout);
  agreement.publish(header_of(p), rows_to);
  const Outcome met = agreement.meet_in_dispatch(p.out_headers);
  if (met != Outcome::kDone) return met;
  receive(p, own);
  return Outcome::kDone;
}

}  // namespace moe_ep::one_sided
