// Combine between CPU ranks: each owner puts its outputs where the sources can read them, each
// source pulls the rows of its tokens and sums them.
//
// The combine rows of a rank are written by it alone (by the experts themselves when they use
// get_combine_input_buffer) between its dispatch and its combine, before it signals `ready`; its
// peers read them after their wait. They are written again after the next dispatch, whose wait
// every active peer satisfies only after its pull. A peer that is masked off in that next round is
// not waited for: it looks, when it has pulled, whether that round has begun.
#include <vector>

#include "core/quantize_row.h"
#include "one_sided/cpu.h"
#include "one_sided/fp8_rows.h"
#include "one_sided/segment.h"
#include "transport/agreement.h"
#include "transport/copy_row.h"
#include "transport/reduce_rows.h"

namespace moe_ep::one_sided {
namespace {

// Brings the rows that hold tokens into the workspace, as they travel; rows without a token are
// never read.
void stage(const CombineParams& p, const Segment& own, const ParallelFor& parallel_for) {
  if (p.expert_output == nullptr) return;
  const int64_t row_bytes = travelling_row_bytes(p);
  const uint64_t pitch = travelling_row_pitch(p);
  const RowCopy copy_row(
      bytes_of_round(p.workspace.geometry.ep_size, p.tokens_per_rank, row_bytes));
  for (int32_t source = 0; source < p.workspace.geometry.ep_size; ++source) {
    if (!p.active.contains(source)) continue;
    const int64_t first = static_cast<int64_t>(source) * p.tokens_per_rank;
    constexpr int64_t kRowsPerChunk = 16;
    parallel_for(0, own.round_header(source).num_rows, kRowsPerChunk,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = first + begin; row < first + end; ++row) {
                     const uint8_t* from = p.expert_output + row * p.expert_output_stride;
                     uint8_t* to = own.combine_row(row, pitch);
                     if (p.low_precision) {
                       quantize_row_to_fp8(from, p.hidden_size, p.row_type, to);
                     } else {
                       copy_row(to, from, row_bytes);
                     }
                   }
                   copy_row.finish();
                 });
  }
}

void pull(const CombineParams& p, const WorkspaceLayout& layout, const Segment& own, int64_t token,
          float* sum) {
  const Geometry& g = p.workspace.geometry;
  const uint64_t pitch = travelling_row_pitch(p);
  const SendSlot* slots = own.send_slots() + token * g.max_destinations();
  const int64_t first = static_cast<int64_t>(p.workspace.ep_rank) * p.tokens_per_rank;
  const uint8_t* rows[kMaxTopK];
  int32_t num_rows = 0;
  for (; num_rows < g.max_destinations() && slots[num_rows].rank >= 0; ++num_rows) {
    const SendSlot& slot = slots[num_rows];
    rows[num_rows] = Segment(p.workspace, layout, slot.rank).combine_row(first + slot.row, pitch);
  }
  if (p.quantized == nullptr) {
    uint8_t* out = p.output + token * p.hidden_size * row_type_bytes(p.row_type);
    if (p.low_precision) {
      reduce_fp8_rows(rows, num_rows, p.hidden_size, p.row_type, out);
    } else {
      reduce_rows(rows, num_rows, p.hidden_size, p.row_type, out);
    }
    return;
  }
  if (p.low_precision) {
    reduce_fp8_rows_to_float(rows, num_rows, p.hidden_size, sum);
  } else {
    reduce_rows_to_float(rows, num_rows, p.hidden_size, p.row_type, sum);
  }
  quantize_sum(*p.quantized, token, sum);
}

}  // namespace

Outcome combine(const CombineParams& p, const ParallelFor& parallel_for) {
  const WorkspaceLayout layout = WorkspaceLayout::of(p.workspace.geometry);
  const Segment own(p.workspace, layout, p.workspace.ep_rank);
  ControlBlock& control = own.control();
  control.phase = Phase::kIdle;

  stage(p, own, parallel_for);
  const Agreement agreement(PeerWait{p.workspace.geometry.ep_size, p.active, Phase::kCombine,
                                     p.timeout_sec, p.workspace.interrupted},
                            p.workspace.ep_rank,
                            [&](int32_t rank) { return Segment(p.workspace, layout, rank); });
  CombineFlag rows{};
  rows.row_type = static_cast<int32_t>(p.row_type);
  rows.low_precision = p.low_precision;
  rows.hidden_size = p.hidden_size;
  Outcome outcome = agreement.meet_in_combine(rows);
  if (outcome == Outcome::kDone) {
    constexpr int64_t kTokensPerChunk = 8;
    parallel_for(0, p.num_tokens, kTokensPerChunk, [&](int64_t begin, int64_t end) {
      std::vector<float> sum(p.quantized != nullptr ? static_cast<size_t>(p.hidden_size) : 0);
      for (int64_t token = begin; token < end; ++token) pull(p, layout, own, token, sum.data());
    });
    if (p.quantized != nullptr) clear_padding_rows(*p.quantized);
    outcome = agreement.confirm_rows();
  }
  if (p.output != nullptr && (outcome == Outcome::kTimeout || outcome == Outcome::kInterrupted)) {
    poison_sums(p.num_tokens * p.hidden_size, p.row_type, p.output);
  }
  return outcome;
}

}  // namespace moe_ep::one_sided
