// What the CUDA kernels get, as plain data in constant memory. The launchers fill it from the same
// params that the CPU takes.
#pragma once

#include <cstdint>

#include "core/device_signal.cuh"
#include "core/expert_partition.h"
#include "core/fingerprint.h"
#include "core/host_device.h"
#include "core/rows.h"
#include "core/status_page.h"
#include "two_sided/channels.h"
#include "two_sided/layout.h"
#include "two_sided/params.h"
#include "two_sided/segment.h"

namespace moe_ep::two_sided {

// The workspace as a kernel sees it.
struct DeviceWorkspace {
  WorkspaceView view;
  FifoLayout layout;
  StatusPage* page;  // pinned host memory
  uint64_t timeout_ns;
  int32_t timeout_sec;
  Reach reach;  // of signals to the other ranks

  __device__ Segment own() const { return {view, layout, view.ep_rank}; }
  __device__ Segment at(int32_t rank) const { return {view, layout, rank}; }
};

__device__ inline uint32_t* failed_word(const DeviceWorkspace& workspace) {
  return &workspace.own().device_round().failed;
}

// There are no masks. A peer that has left may have sent first what is still to be received, in any
// number of slots: it is waited for until the deadline.
__device__ inline Missed obstacle_of(const DeviceWorkspace&, int32_t, uint32_t) {
  return Missed::kDeadline;
}

// The rows of one field, on one side of the exchange.
struct FieldRows {
  uint8_t* data;
  int64_t stride;
  int64_t row_bytes;
  int32_t begin;  // its first chunk in a record; behind the last field, more than there are
  bool is_whole;  // its rows start on 16 bytes and are of whole chunks
};

// A token's record, on one side of the exchange.
struct RecordRows {
  FieldRows fields[kMaxPayloads];
};

struct PrepareKernelParams {
  DeviceWorkspace workspace;
  PrepareParams call;
  ExpertPartition partition;
  // The ids, where each token's are whole vectors; else there are none.
  const uint4* id_vectors;
  int32_t vectors_per_token;
};

struct AlltoallvKernelParams {
  DeviceWorkspace workspace;
  StreamPlan plan;
  CtaShape shape;
  int32_t num_tokens;
  int32_t tokens_per_rank;
  uint32_t fields;  // hash of their widths
  const int32_t* send_tokens;
  int32_t* recv_counts;
  RecordRows given;
  RecordRows received;
};

struct CombineKernelParams {
  DeviceWorkspace workspace;
  StreamPlan plan;
  CtaShape shape;
  int32_t num_tokens;
  int32_t tokens_per_rank;
  uint32_t signature;  // of what must be the same on all ranks
  const int32_t* send_tokens;
  FieldRows expert_rows;
  uint8_t* output;  // rows of expert_rows.row_bytes, dense
  bool output_is_whole;
};

// Of what alltoallv is called with and prepare was told.
MOE_EP_HOST_DEVICE constexpr uint32_t hash_of(const FieldWidths& fields) {
  uint64_t words[1 + kMaxPayloads] = {static_cast<uint64_t>(fields.num_fields)};
  for (int32_t i = 0; i < fields.num_fields; ++i) {
    words[1 + i] = static_cast<uint64_t>(fields.row_bytes[i]);
  }
  const uint64_t hash = fingerprint_of(words);
  return static_cast<uint32_t>(hash ^ hash >> 32);
}

}  // namespace moe_ep::two_sided
