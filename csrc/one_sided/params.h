// What one call of dispatch or combine needs, as plain data: the ops fill it, launchers and kernels
// read it. Pointers are to this process's mapping; offsets come from the layout, never from here.
#pragma once

#include <cstdint>

#include "core/geometry.h"
#include "core/interrupt.h"
#include "core/limits.h"
#include "core/quant_formats.h"
#include "core/rank_mask.h"
#include "core/rows.h"
#include "core/workspace_layout.h"

namespace moe_ep::one_sided {

// What every call on a workspace knows about it.
struct WorkspaceView {
  uint8_t* base;        // row 0 of the [ep_size, segment_bytes] workspace
  int64_t rank_stride;  // bytes from one rank's segment to the next
  int32_t ep_rank;
  Geometry geometry;
  InterruptCheck interrupted = nullptr;  // null: waits end with their deadline only

  uint8_t* segment(int32_t rank) const { return base + rank * rank_stride; }
};

struct DispatchParams {
  WorkspaceView workspace;
  RankMask active;

  int32_t num_tokens;
  int32_t tokens_per_rank;
  const void* topk_ids;  // [num_tokens, top_k], int64 if ids_are_int64, else int32
  bool ids_are_int64;
  bool has_weights;           // not told by the pointer, which is null for no tokens, too
  const float* topk_weights;  // [num_tokens, top_k]
  RowsIn payloads[kMaxPayloads];
  int32_t num_payloads;
  const int32_t* eplb_local_stats;  // [eplb_stats_num_experts] or null
  int64_t invalid_expert_id;
  int32_t timeout_sec;

  int32_t* out_topk_ids;     // [ep_size * tokens_per_rank, top_k]
  float* out_topk_weights;   // the same, or null
  int32_t* out_recv_counts;  // [ep_size]
  int32_t* out_eplb_stats;   // [ep_size, eplb_stats_num_experts] or null
  RoundHeader* out_headers;  // [ep_size]; filled where the ranks disagree
};

struct CombineParams {
  WorkspaceView workspace;
  RankMask active;

  int32_t num_tokens;
  int32_t tokens_per_rank;
  int64_t hidden_size;
  RowType row_type;
  const uint8_t*
      expert_output;  // [ep_size * tokens_per_rank, hidden_size]; null: already in the workspace
  int64_t expert_output_stride;  // bytes from one row to the next
  bool low_precision;            // rows travel as scaled FP8, see core/scaled_fp8.h
  // With low_precision: the rows are in the workspace as they are, and who sums them quantises
  // them.
  bool reader_quantizes;
  int32_t timeout_sec;

  uint8_t* output;                 // [num_tokens, hidden_size] of row_type, rows dense; or null and
  const QuantizedRows* quantized;  // where the sums go in a block-scaled format instead
};

}  // namespace moe_ep::one_sided
