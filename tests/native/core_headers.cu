// The headers of csrc/core are for host and device alike. This compiles them for both, evaluates
// them at compile time, and as a program on a GPU compares what both sides compute, word by word.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "core/epoch.h"
#include "core/expert_partition.h"
#include "core/float_formats.h"
#include "core/geometry.h"
#include "core/payload_placement.h"
#include "core/quantize_row.h"
#include "core/rank_mask.h"
#include "core/status.h"
#include "core/workspace_layout.h"

namespace moe_ep {

MOE_EP_HOST_DEVICE constexpr Geometry geometry() {
  return {8, 256, 8, 4096, 14336, 14336, 256, 8, 1, 0, 8, 1};
}
static_assert(WorkspaceLayout::of(geometry()).segment_bytes % kRegionAlignment == 0);
static_assert(WorkspaceLayout::of(geometry()).combine_rows.offset -
                  WorkspaceLayout::of(geometry()).payloads.offset >=
              uint64_t{8} * 4096 * 14336);
// 896 chunks of a row are dealt to 299 threads with four packets each; 8 ranks have 8 slots.
static_assert(PacketSlots::of_combine(geometry()) == 299 * 4 * 16);
static_assert(WorkspaceLayout::of(geometry()).segment_bytes -
                  WorkspaceLayout::of(geometry()).combine_packets.offset ==
              8 * 8 * 299 * 4 * 16);
static_assert(WorkspaceLayout::of(geometry()).combine_packets.offset >=
              WorkspaceLayout::of(geometry()).end_of_control());
static_assert(ExpertPartition(10, 4).of_rank(1).first == 3);
static_assert(ExpertPartition(2, 4).owner_of(1) == 1);
static_assert(epoch_reached(0, 0xFFFFFFFF) && !epoch_reached(0xFFFFFFFF, 0));

constexpr int kWords = 256;

// Fills `out` with numbers that depend on every header.
MOE_EP_HOST_DEVICE inline void evaluate(uint32_t* out) {
  int n = 0;
  const WorkspaceLayout layout = WorkspaceLayout::of(geometry());
  out[n++] = static_cast<uint32_t>(layout.segment_bytes);
  out[n++] = static_cast<uint32_t>(layout.combine_rows.offset >> 8);
  out[n++] = static_cast<uint32_t>(layout.combine_packets.offset >> 8);
  const int64_t row_bytes[] = {7168, 224};
  out[n++] = static_cast<uint32_t>(PayloadPlacement::of(geometry(), 100, row_bytes, 2).offset[1]);
  const ExpertPartition partition(30, 8);
  for (int expert = 0; expert < 30; ++expert) out[n++] = partition.owner_of(expert);
  RankMask mask;
  mask.insert(200);
  out[n++] = mask.contains(200) && !mask.contains(199);
  out[n++] = static_cast<uint32_t>(geometry().fingerprint());
  float row[45];
  for (int i = 0; i < 45; ++i) {
    row[i] = float_from_bits(0x3F000000u + 0x01234567u * static_cast<uint32_t>(i));
    out[n++] = float_to_bf16(row[i]) | static_cast<uint32_t>(float_to_fp16(row[i])) << 16;
  }
  uint8_t values[45];
  uint8_t scales[512];
  for (const QuantFormat format : {QuantFormat::kMxfp8, QuantFormat::kMxfp4, QuantFormat::kNvfp4}) {
    const QuantizedRows rows{format, ScaleLayout::kSwizzle128x4, 3.0f, 1, 45, values, scales};
    quantize_row(rows, 0, row);
    for (int64_t i = 0; i < quantized_row_bytes(format, 45); ++i) out[n++] = values[i];
    out[n++] = scales[0];
  }
  while (n < kWords) out[n++] = 0;
}

__global__ void evaluate_kernel(uint32_t* out) { evaluate(out); }

}  // namespace moe_ep

int main() {
  uint32_t host[moe_ep::kWords];
  moe_ep::evaluate(host);
  uint32_t* device = nullptr;
  if (cudaMalloc(&device, moe_ep::kWords * sizeof(uint32_t)) != cudaSuccess) {
    std::printf("no GPU: %s\n", cudaGetErrorString(cudaGetLastError()));
    return 77;  // skipped
  }
  moe_ep::evaluate_kernel<<<1, 1>>>(device);
  uint32_t back[moe_ep::kWords];
  const cudaError_t error = cudaMemcpy(back, device, sizeof(back), cudaMemcpyDeviceToHost);
  if (error != cudaSuccess) {
    std::printf("%s\n", cudaGetErrorString(error));
    return 1;
  }
  for (int i = 0; i < moe_ep::kWords; ++i) {
    if (host[i] != back[i]) {
      std::printf("word %d: host %08x, device %08x\n", i, host[i], back[i]);
      return 1;
    }
  }
  std::printf("host and device agree on %d words\n", moe_ep::kWords);
  return 0;
}
