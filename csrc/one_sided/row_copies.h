// Small kernels beside the exchange: received rows as a tensor of their own, ids of empty rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace moe_ep::one_sided {

// The received rows of one payload, and where they are to be copied.
struct ReceivedRows {
  const uint8_t* rows;         // [ep_size * tokens_per_rank], pitch apart
  uint64_t pitch;              // a multiple of kRowAlignment
  const int32_t* recv_counts;  // [ep_size], of the own segment
  int32_t ep_size;
  int32_t tokens_per_rank;
  int64_t row_bytes;
  uint8_t* out;  // [ep_size * tokens_per_rank, row_bytes], its start a multiple of kRowAlignment
};

// Between dispatch and combine. Rows without a token become zeros.
cudaError_t launch_copy_received_rows(const ReceivedRows& rows, cudaStream_t stream);

// ids: [num_sources, tokens_per_rank, top_k]; of source s, all from row counts[s] on become the
// invalid id.
struct IdsToSanitize {
  int32_t* ids;
  const int32_t* counts;  // [num_sources]
  int64_t num_sources;
  int64_t tokens_per_rank;
  int64_t top_k;
  int32_t invalid_expert_id;
};
cudaError_t launch_sanitize_expert_ids(const IdsToSanitize& ids, cudaStream_t stream);

}  // namespace moe_ep::one_sided
