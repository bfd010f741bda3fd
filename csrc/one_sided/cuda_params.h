// What the CUDA kernels get, as plain data in constant memory. The launchers fill it from the same
// DispatchParams and CombineParams that the CPU takes; offsets come from the layout.
#pragma once

#include <cstdint>

#include "core/device_signal.cuh"
#include "core/expert_partition.h"
#include "core/payload_placement.h"
#include "core/status_page.h"
#include "core/workspace_layout.h"
#include "one_sided/params.h"

namespace moe_ep::one_sided {

// The workspace as a kernel sees it.
struct DeviceWorkspace {
  uint8_t* base;
  int64_t rank_stride;
  int32_t ep_rank;
  int32_t ep_size;
  int32_t top_k;
  int32_t max_destinations;
  int32_t low_latency_tokens;
  int32_t push_slots;
  int32_t eplb_stats_num_experts;
  Reach reach;  // of signals to the other ranks
  WorkspaceLayout layout;
  uint64_t dispatch_slot_bytes;  // of PacketSlots
  uint64_t stats_slot_bytes;
  uint64_t combine_slot_bytes;
  StatusPage* page;  // pinned host memory
  uint64_t timeout_ns;
  int32_t timeout_sec;
  bool has_rank_masks;  // ranks may be left behind
};

// A rank mask by value, or in device memory: then it is read when the kernel runs.
struct ActiveRanks {
  RankMask fixed;
  const uint64_t* on_device;  // null: `fixed`
};

// What small steps need comes first: on an H200 a launch has the first 512 bytes of its parameters
// at hand, and every 128 bytes behind them that it looks at take 0.06 us.
struct DispatchKernelParams {
  DeviceWorkspace workspace;
  int32_t num_tokens;
  int32_t tokens_per_rank;
  const void* topk_ids;       // [num_tokens, top_k]
  const float* topk_weights;  // the same, if there are any
  // Where ids, weights, counts and statistics are to arrive: in the own segment, or fresh tensors.
  int32_t* out_topk_ids;     // [ep_size * tokens_per_rank, top_k]
  float* out_topk_weights;   // the same, or null
  int32_t* out_recv_counts;  // [ep_size]
  int32_t* out_eplb_stats;   // [ep_size, eplb_stats_num_experts], or null
  uint32_t signature;        // of all that must be the same on all ranks, the mask excepted
  int32_t invalid_expert_id;
  bool has_weights;
  bool ids_are_int64;
  bool ids_are_vectors;  // int32, and every row starts on 16 bytes and is of whole 16 bytes
  ExpertPartition partition;
  ActiveRanks active;
  const int32_t* eplb_local_stats;  // or null

  RowsIn payloads[kMaxPayloads];
  PayloadPlacement placement;
  bool payload_is_aligned[kMaxPayloads];  // start and stride are multiples of kRowAlignment, and
                                          // so is row_bytes: rows can be copied in bulk
  int32_t num_payloads;
  // Chunks of a token's record, part by part: payloads, then ids, then weights if there are any.
  int32_t chunks_end[kMaxPayloads];  // behind payload i
  int32_t num_chunks;
};

struct CombineKernelParams {
  DeviceWorkspace workspace;
  uint32_t signature;  // of row_type, hidden_size, precision, and whether rows are pushed or pulled

  int32_t num_tokens;
  int32_t tokens_per_rank;
  int64_t hidden_size;
  RowType row_type;
  int64_t row_bytes;             // of expert_output and output
  uint64_t pitch;                // of the combine rows
  const uint8_t* expert_output;  // [ep_size * tokens_per_rank] rows; null: in the workspace already
  int64_t expert_output_stride;
  bool expert_output_is_aligned;  // as payload_is_aligned

  uint8_t* output;          // [num_tokens, hidden_size], rows dense; or null and
  QuantizedRows quantized;  // where the sums go in a block-scaled format instead
  bool output_is_quantized;
  bool output_is_aligned;
  bool reader_quantizes;  // as in CombineParams
};

}  // namespace moe_ep::one_sided
