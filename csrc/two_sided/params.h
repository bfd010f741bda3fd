// What one call needs, as plain data: the ops fill it. Pointers are to this process's mapping;
// offsets come from the layout, never from here.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/interrupt.h"
#include "core/limits.h"
#include "core/rows.h"
#include "core/workspace_layout.h"
#include "two_sided/geometry.h"

namespace moe_ep::two_sided {

// What every call on a workspace knows about it.
struct WorkspaceView {
  uint8_t* base;        // row 0 of the [ep_size, segment_bytes] workspace
  int64_t rank_stride;  // bytes from one rank's segment to the next
  int32_t ep_rank;
  Geometry geometry;
  InterruptCheck interrupted = nullptr;  // null: waits end with their deadline only

  MOE_EP_HOST_DEVICE uint8_t* segment(int32_t rank) const { return base + rank * rank_stride; }
};

// The tensors that a dispatch moves together; each has a row for every token.
struct FieldWidths {
  int32_t num_fields;
  int64_t row_bytes[kMaxPayloads];
};

struct PrepareParams {
  WorkspaceView workspace;
  int32_t num_tokens;
  int32_t tokens_per_rank;
  const void* topk_ids;  // [num_tokens, top_k], int64 if ids_are_int64, else int32
  bool ids_are_int64;
  int64_t invalid_expert_id;
  FieldWidths fields;
  bool has_weights;  // whether weights are among the fields: for who compares the ranks
  int32_t timeout_sec;

  int32_t* out_topk_ids;     // [num_tokens, top_k]: the ids as receivers must see them
  int32_t* out_send_tokens;  // [num_tokens * max_destinations()], see send_tokens below
  int32_t* out_send_counts;  // [ep_size]
  int32_t* out_recv_counts;  // [ep_size]
  RoundHeader* out_headers;  // [ep_size]; filled where the ranks disagree
};

struct AlltoallvParams {
  WorkspaceView workspace;
  int32_t num_tokens;
  int32_t tokens_per_rank;
  // The tokens for rank 0 in ascending order, then those for rank 1, ...; how many go to each
  // stands in the segment.
  const int32_t* send_tokens;
  int32_t num_fields;
  RowsIn rows[kMaxPayloads];        // [num_tokens] rows each
  uint8_t* received[kMaxPayloads];  // [ep_size * tokens_per_rank] dense rows each
  int32_t* recv_counts;             // [ep_size]; CUDA: 0 if they do not come
  int32_t timeout_sec;
};

struct CombineParams {
  WorkspaceView workspace;
  int32_t num_tokens;
  int32_t tokens_per_rank;
  int64_t hidden_size;
  RowType row_type;
  const int32_t* send_tokens;  // as dispatch got it
  RowsIn expert_output;        // [ep_size * tokens_per_rank] rows
  int32_t timeout_sec;
  uint8_t* output;  // [num_tokens, hidden_size] of row_type, dense; apart from expert_output
};

}  // namespace moe_ep::two_sided
