#include "two_sided/cuda_alltoallv.cuh"

#include <limits>

#include "two_sided/cuda_launch.h"

namespace moe_ep::two_sided {
namespace {

// Chunks of a record; 0 where there are more than kernels can count.
int32_t set_records(AlltoallvKernelParams& k, const AlltoallvParams& p) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  int64_t chunks = 0;
  for (int32_t i = 0; i < kMaxPayloads; ++i) {
    k.given.fields[i].begin = k.received.fields[i].begin = kMost;
    if (i >= p.num_fields || p.rows[i].row_bytes == 0) continue;
    const RowsIn& rows = p.rows[i];
    k.given.fields[i] = field_rows(rows.data, rows.stride, rows.row_bytes, chunks);
    k.received.fields[i] = field_rows(p.received[i], rows.row_bytes, rows.row_bytes, chunks);
    chunks += chunks_of(rows.row_bytes);
    if (chunks >= kMost / 2) return 0;
  }
  return static_cast<int32_t>(chunks);
}

}  // namespace

cudaError_t launch_alltoallv(const AlltoallvParams& p, const CudaContext& context) {
  AlltoallvKernelParams k{};
  FieldWidths widths{p.num_fields, {}};
  for (int32_t i = 0; i < p.num_fields; ++i) widths.row_bytes[i] = p.rows[i].row_bytes;
  const int32_t chunks = set_records(k, p);
  if (chunks == 0) return cudaErrorInvalidValue;
  const Geometry& g = p.workspace.geometry;
  k.workspace = device_workspace(p.workspace, p.timeout_sec, context);
  k.plan = StreamPlan::of(g, CtaShape::joined_in_alltoallv(g.ep_size), chunks, p.tokens_per_rank);
  k.shape = CtaShape::of_alltoallv(g.ep_size);
  k.num_tokens = p.num_tokens;
  k.tokens_per_rank = p.tokens_per_rank;
  k.fields = hash_of(widths);
  k.send_tokens = p.send_tokens;
  k.recv_counts = p.recv_counts;
  const auto kernel =
      g.ep_size <= kWarpSize ? &alltoallv_kernel<1> : &alltoallv_kernel<kMaxEpSize / kWarpSize>;
  return launch(kernel, ctas_for(k.plan, k.shape, context), kCtaThreads, context, k,
                Behind::kPrepare);
}

}  // namespace moe_ep::two_sided
