// A run of vectors of a token's sum, 512 bytes each: how a warp gets them from the rows and stores
// them. As many as the registers hold are on their way at once.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "one_sided/combine_plan.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/token_rows.cuh"
#include "transport/device/memory_access.cuh"
#include "transport/device/row_sum.cuh"

namespace moe_ep::one_sided {

// What is still to be summed.
struct VectorRun {
  uint64_t offset;  // of this lane's next chunk in a row
  uint8_t* out;     // for the next vector
  int32_t bytes;    // of the row of the output, from there to the end of the run

  // Vectors [first, end) of the token's sum.
  __device__ VectorRun(const CombineKernelParams& p, uint32_t token, uint32_t first, uint32_t end) {
    const int64_t begin = int64_t{first} * kVectorBytes;
    const int64_t length = int64_t{end - first} * kVectorBytes;
    offset = static_cast<uint64_t>(begin + lane_id() * 16);
    out = p.output + token * p.row_bytes + begin;
    bytes = static_cast<int32_t>(min(p.row_bytes - begin, length));
  }
  __device__ void advance(int32_t by) {
    offset += static_cast<uint32_t>(by);
    out += by;
    bytes -= by;
  }
};

// Gets all rows of the token, kRows of them, for an aligned output, kVectors vectors at a time;
// less than that is left over. The end of a row is never looked at here: to ask for each chunk
// whether it is there takes more instructions than all else.
template <RowType kType, int kRows, int kVectors>
__device__ void get_some_rows(VectorRun& run, const TokenRows& rows) {
  constexpr auto kBytes = static_cast<int32_t>(kVectorBytes);
  const uint8_t* row[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const auto bits = reinterpret_cast<unsigned long long>(rows.row);
    row[k] = reinterpret_cast<const uint8_t*>(__shfl_sync(kAllLanes, bits, k));
  }
#pragma unroll 1
  while (run.bytes >= kVectors * kBytes) {
    uint4 chunk[kRows][kVectors];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) chunk[k][v] = load_chunk(row[k] + run.offset + v * kBytes);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float sum[Chunk<kType>::kElements];
      start(sum, true);
#pragma unroll
      for (int k = 0; k < kRows; ++k) Chunk<kType>::add(sum, chunk[k][v]);
      store_chunk(run.out + lane_id() * 16 + v * kBytes, Chunk<kType>::round(sum));
    }
    run.advance(kVectors * kBytes);
  }
}

// With up to 16 chunks of a lane on their way. For `rows.count` rows, kFewest to kMost; see
// add_counted_rows.
template <RowType kType, int kFewest, int kMost>
__device__ void get_counted_rows(VectorRun& run, const TokenRows& rows) {
  if constexpr (kFewest == kMost) {
    if constexpr (kMost <= 2) get_some_rows<kType, kMost, 8>(run, rows);
    get_some_rows<kType, kMost, kMost <= 4 ? 4 : 2>(run, rows);
  } else {
    constexpr int kMiddle = (kFewest + kMost) / 2;
    if (rows.count <= kMiddle) {
      get_counted_rows<kType, kFewest, kMiddle>(run, rows);
    } else {
      get_counted_rows<kType, kMiddle + 1, kMost>(run, rows);
    }
  }
}

// The rest of the run: any number of rows, any output, one vector after the other.
// valid: whether sums may be formed.
template <RowType kType>
__device__ void get_one_by_one(const CombineKernelParams& p, VectorRun& run, const TokenRows& rows,
                               bool valid, uint4* scratch) {
#pragma unroll 1
  while (run.bytes > 0) {
    float sum[Chunk<kType>::kElements];
    start(sum, valid);
    // Lanes behind the end of the row read its last chunk.
    if (valid) add_rows<kType>(sum, rows, min(run.offset, p.pitch - kRowAlignment));
    store_rounded<kType>(run.out, min(run.bytes, static_cast<int32_t>(kVectorBytes)),
                         p.output_is_aligned, Chunk<kType>::round(sum), scratch);
    run.advance(kVectorBytes);
  }
}

}  // namespace moe_ep::one_sided
