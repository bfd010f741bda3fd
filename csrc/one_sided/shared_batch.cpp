#include "one_sided/shared_batch.h"

#include "one_sided/segment.h"
#include "transport/agreement.h"
#include "transport/reduce_rows.h"

namespace moe_ep::one_sided {
namespace {

PeerWait wait_for_all(const SharedBatch& p, Phase phase) {
  const int32_t ep_size = p.workspace.geometry.ep_size;
  return {ep_size, RankMask::all(ep_size), phase, p.timeout_sec, p.workspace.interrupted};
}

}  // namespace

Outcome begin_shared_batch(const SharedBatch& p, RoundHeader* out_headers) {
  const Geometry& g = p.workspace.geometry;
  const WorkspaceLayout layout = WorkspaceLayout::of(g);
  const auto segment_of = [&](int32_t rank) { return Segment(p.workspace, layout, rank); };
  ControlBlock& control = segment_of(p.workspace.ep_rank).control();
  const Sending sending(control);
  const PeerWait how = wait_for_all(p, Phase::kDispatch);
  begin_round(control, how.active);
  control.phase = Phase::kDispatch;
  control.num_tokens = p.num_tokens;
  control.tokens_per_rank = 0;  // of rows that travel
  control.invalid_id.count = 0;

  const Agreement agreement(how, p.workspace.ep_rank, segment_of);
  if (const Outcome same = agreement.compare_masks(); same != Outcome::kDone) return same;
  RoundHeader header{};
  header.num_payloads = kSharedBatch;
  header.top_k = static_cast<int16_t>(g.top_k);
  header.num_experts = g.num_experts;
  header.row_bytes[kBatchTokens] = p.num_tokens;
  header.row_bytes[kBatchRouting] = p.routing;
  constexpr int32_t kNoRows[kMaxEpSize] = {};
  agreement.publish(header, kNoRows);
  return agreement.meet_in_dispatch(out_headers);
}

Outcome end_shared_batch(const SharedBatch& p, int64_t hidden_size, RowType row_type, uint8_t* out,
                         const ParallelFor& parallel_for) {
  const int32_t ep_size = p.workspace.geometry.ep_size;
  const WorkspaceLayout layout = WorkspaceLayout::of(p.workspace.geometry);
  const auto segment_of = [&](int32_t rank) { return Segment(p.workspace, layout, rank); };
  segment_of(p.workspace.ep_rank).control().phase = Phase::kIdle;

  const Agreement agreement(wait_for_all(p, Phase::kCombine), p.workspace.ep_rank, segment_of);
  CombineFlag flag{};
  flag.row_type = static_cast<int32_t>(row_type);
  flag.hidden_size = hidden_size;
  const Outcome met = agreement.meet_in_combine(flag);
  if (met != Outcome::kDone) return met;
  const int64_t row_bytes = hidden_size * row_type_bytes(row_type);
  const uint64_t pitch = row_pitch(row_bytes);
  constexpr int64_t kTokensPerChunk = 16;
  parallel_for(0, p.num_tokens, kTokensPerChunk, [&](int64_t begin, int64_t end) {
    const uint8_t* rows[kMaxTopK];
    for (int64_t token = begin; token < end; ++token) {
      for (int32_t rank = 0; rank < ep_size; ++rank) {
        rows[rank] = segment_of(rank).combine_row(token, pitch);
      }
      reduce_rows(rows, ep_size, hidden_size, row_type, out + token * row_bytes);
    }
  });
  return agreement.confirm_rows();
}

}  // namespace moe_ep::one_sided
