// Combine between CPU ranks: each owner puts its outputs where the sources can read them, each
// source pulls the rows of its tokens and sums them.
//
// The combine rows of a rank are written by it alone (by the experts themselves when they use
// get_combine_input_buffer) between its dispatch and its combine, before it signals `ready`; its
// peers read them after their wait. They are written again after the next dispatch, whose wait
// every active peer satisfies only after its pull. A peer that is masked off in that next round is
// not waited for: this is why a living rank must have left its last combine before it is masked.
#include <algorithm>
#include <vector>

#include "cake/copy_row.h"
#include "cake/cpu.h"
#include "cake/fp8_rows.h"
#include "cake/reduce_rows.h"
#include "cake/segment.h"
#include "cake/wait_for_peers.h"
#include "core/float_formats.h"
#include "core/quantize_row.h"

namespace moe_ep::cake {
namespace {

// Brings the rows that hold tokens into the workspace, as they travel; rows without a token are
// never read.
void stage(const CombineParams& p, const Segment& own, const ParallelFor& parallel_for) {
  if (p.expert_output == nullptr) return;
  const int64_t row_bytes = travelling_row_bytes(p);
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
                     uint8_t* to = own.combine_row(row, row_bytes);
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
  const int64_t row_bytes = travelling_row_bytes(p);
  const SendSlot* slots = own.send_slots() + token * g.max_destinations();
  const int64_t first = static_cast<int64_t>(p.workspace.ep_rank) * p.tokens_per_rank;
  const uint8_t* rows[kMaxTopK];
  int32_t num_rows = 0;
  for (; num_rows < g.max_destinations() && slots[num_rows].rank >= 0; ++num_rows) {
    const SendSlot& slot = slots[num_rows];
    rows[num_rows] =
        Segment(p.workspace, layout, slot.rank).combine_row(first + slot.row, row_bytes);
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

void publish(const CombineParams& p, const WorkspaceLayout& layout, uint32_t epoch) {
  for (int32_t peer = 0; peer < p.workspace.geometry.ep_size; ++peer) {
    if (!p.active.contains(peer)) continue;
    const Segment segment(p.workspace, layout, peer);
    CombineFlag& flag = segment.combine_flag(p.workspace.ep_rank);
    flag.row_type = static_cast<int32_t>(p.row_type);
    flag.low_precision = p.low_precision;
    flag.hidden_size = p.hidden_size;
    signal(&flag.ready, epoch, &segment.control().sleepers);
  }
}

bool flags_agree(const CombineParams& p, const Segment& own) {
  for (int32_t owner = 0; owner < p.workspace.geometry.ep_size; ++owner) {
    if (!p.active.contains(owner)) continue;
    const CombineFlag& flag = own.combine_flag(owner);
    const bool same_rows =
        flag.row_type == static_cast<int32_t>(p.row_type) && flag.hidden_size == p.hidden_size;
    if (!same_rows || flag.low_precision != p.low_precision) return false;
  }
  return true;
}

// A sum that was not formed must not look like one.
void poison(const CombineParams& p) {
  if (p.output == nullptr) return;
  const int64_t elements = p.num_tokens * p.hidden_size;
  switch (p.row_type) {
    case RowType::kFloat32:
      std::fill_n(reinterpret_cast<uint32_t*>(p.output), elements, kFloat32Nan);
      break;
    case RowType::kFloat16:
      std::fill_n(reinterpret_cast<uint16_t*>(p.output), elements, kFloat16Nan);
      break;
    case RowType::kBFloat16:
      std::fill_n(reinterpret_cast<uint16_t*>(p.output), elements, kBFloat16Nan);
      break;
  }
}

}  // namespace

Outcome combine(const CombineParams& p, const ParallelFor& parallel_for) {
  const WorkspaceLayout layout = WorkspaceLayout::of(p.workspace.geometry);
  const Segment own(p.workspace, layout, p.workspace.ep_rank);
  ControlBlock& control = own.control();
  control.phase = Phase::kIdle;

  stage(p, own, parallel_for);
  publish(p, layout, control.epoch);
  const Outcome met = wait_for_peers(p.workspace, p.active, control, Phase::kCombine, p.timeout_sec,
                                     deadline_in(p.timeout_sec),
                                     [&](int32_t peer) { return &own.combine_flag(peer).ready; });
  if (met != Outcome::kDone) {
    poison(p);
    return met;
  }
  if (!flags_agree(p, own)) return Outcome::kDisagreement;
  constexpr int64_t kTokensPerChunk = 8;
  parallel_for(0, p.num_tokens, kTokensPerChunk, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(p.quantized != nullptr ? static_cast<size_t>(p.hidden_size) : 0);
    for (int64_t token = begin; token < end; ++token) pull(p, layout, own, token, sum.data());
  });
  if (p.quantized != nullptr) clear_padding_rows(*p.quantized);
  return Outcome::kDone;
}

}  // namespace moe_ep::cake
