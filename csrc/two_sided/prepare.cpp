// The first step of a round: each rank finds out where its tokens go, tells the others how many
// rows they will get, and learns whether all mean the same round. No rows move yet.
#include <algorithm>

#include "transport/agreement.h"
#include "transport/routing.h"
#include "two_sided/cpu.h"
#include "two_sided/segment.h"

namespace moe_ep::two_sided {
namespace {

// Fills send_counts and out_send_tokens, and records ids of no expert.
void route(const PrepareParams& p, const Segment& own, const TokenRouter& router) {
  const int32_t ranks = p.workspace.geometry.ep_size;
  int32_t* counts = own.send_counts();
  std::fill_n(counts, ranks, 0);
  InvalidIdRecord& invalid_id = own.control().invalid_id;
  invalid_id.count = 0;
  for (int32_t token = 0; token < p.num_tokens; ++token) {
    for_each_rank(router.destinations_of(token, &invalid_id), ranks,
                  [&](int32_t rank) { ++counts[rank]; });
  }
  int64_t next[kMaxEpSize];  // where the next token for each rank goes
  int64_t first = 0;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    next[rank] = first;
    first += counts[rank];
  }
  for (int32_t token = 0; token < p.num_tokens; ++token) {
    for_each_rank(router.destinations_of(token, nullptr), ranks,
                  [&](int32_t rank) { p.out_send_tokens[next[rank]++] = token; });
    int32_t* ids = p.out_topk_ids + static_cast<int64_t>(token) * p.workspace.geometry.top_k;
    for (int32_t slot = 0; slot < p.workspace.geometry.top_k; ++slot) {
      ids[slot] = router.id_to_send(token, slot);
    }
  }
  own.round_state().send_tokens_hash = hash_of_tokens(p.out_send_tokens, first);
  // Places that no token takes: the contents of a result must not depend on what was there.
  const int64_t places =
      static_cast<int64_t>(p.num_tokens) * p.workspace.geometry.max_destinations();
  std::fill(p.out_send_tokens + first, p.out_send_tokens + places, -1);
}

// What must be the same on all ranks.
RoundHeader header_of(const PrepareParams& p) {
  RoundHeader header{};
  header.tokens_per_rank = p.tokens_per_rank;
  header.has_weights = p.has_weights;
  header.num_payloads = static_cast<int16_t>(p.fields.num_fields);
  header.top_k = static_cast<int16_t>(p.workspace.geometry.top_k);
  header.num_experts = p.workspace.geometry.num_experts;
  std::copy_n(p.fields.row_bytes, p.fields.num_fields, header.row_bytes);
  return header;
}

}  // namespace

uint64_t hash_of_tokens(const int32_t* send_tokens, int64_t count) {
  uint64_t hash = static_cast<uint64_t>(count);
  for (int64_t i = 0; i < count; ++i) {
    hash = (hash ^ static_cast<uint32_t>(send_tokens[i])) * 0x9e3779b97f4a7c15u;
  }
  return hash;
}

Outcome prepare(const PrepareParams& p) {
  const Geometry& g = p.workspace.geometry;
  const FifoLayout layout = FifoLayout::of(g);
  const Segment own(p.workspace, layout, p.workspace.ep_rank);
  ControlBlock& control = own.control();
  const RankMask all = RankMask::all(g.ep_size);
  begin_round(control, all);
  control.phase = Phase::kDispatch;
  control.num_tokens = p.num_tokens;
  control.tokens_per_rank = p.tokens_per_rank;
  own.round_state().rows_delivered = 0;

  route(p, own,
        TokenRouter({p.topk_ids, p.ids_are_int64, g.top_k, p.invalid_expert_id, all}, g.num_experts,
                    g.ep_size));

  const Agreement agreement(
      PeerWait{g.ep_size, all, Phase::kDispatch, p.timeout_sec, p.workspace.interrupted},
      p.workspace.ep_rank, [&](int32_t rank) { return Segment(p.workspace, layout, rank); });
  agreement.publish(header_of(p), own.send_counts());
  const Outcome met = agreement.meet_in_dispatch(p.out_headers);
  if (met != Outcome::kDone) return met;
  for (int32_t source = 0; source < g.ep_size; ++source) {
    own.recv_counts()[source] = own.round_header(source).num_rows;
  }
  std::copy_n(own.send_counts(), g.ep_size, p.out_send_counts);
  std::copy_n(own.recv_counts(), g.ep_size, p.out_recv_counts);
  return Outcome::kDone;
}

}  // namespace moe_ep::two_sided
