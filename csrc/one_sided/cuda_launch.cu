#include "one_sided/cuda_launch.h"

#include "one_sided/fp8_rows.h"
#include "one_sided/small_steps.h"
#include "transport/reduce_rows.h"

namespace moe_ep::one_sided {
namespace {

// Mixes a number into a hash of values that must be the same on all ranks.
constexpr uint32_t mixed(uint32_t hash, uint64_t value) {
  for (int shift = 0; shift < 64; shift += 32) {
    hash = (hash ^ static_cast<uint32_t>(value >> shift)) * 0x85EBCA6Bu;
    hash ^= hash >> 15;
  }
  return hash;
}

bool is_aligned(const void* start, int64_t stride, int64_t row_bytes) {
  const auto bits = reinterpret_cast<uint64_t>(start) | static_cast<uint64_t>(stride) |
                    static_cast<uint64_t>(row_bytes);
  return bits % kRowAlignment == 0;
}

uint32_t signature_of(const DispatchParams& p) {
  uint32_t hash = mixed(1, static_cast<uint64_t>(p.tokens_per_rank));
  hash = mixed(hash, p.has_weights);
  hash = mixed(hash, p.eplb_local_stats != nullptr);
  hash = mixed(hash, static_cast<uint64_t>(p.workspace.geometry.top_k));
  hash = mixed(hash, static_cast<uint64_t>(p.workspace.geometry.num_experts));
  for (int32_t i = 0; i < p.num_payloads; ++i) {
    hash = mixed(hash, static_cast<uint64_t>(p.payloads[i].row_bytes));
  }
  return hash;
}

// Sums that are quantised are pulled, in small steps, too. A rank that pulls sends no packets, and
// one that pushes need not have its rows where they can be pulled: so ranks of which only some push
// a small step, or rows in low precision, must see that they disagree.
uint32_t signature_of(const CombineParams& p) {
  const bool pushes = p.quantized == nullptr && !p.low_precision &&
                      is_pushed(p.workspace.geometry, p.tokens_per_rank);
  uint32_t hash = mixed(2, static_cast<uint64_t>(p.row_type));
  hash = mixed(hash, static_cast<uint64_t>(p.hidden_size));
  hash = mixed(hash, p.low_precision);
  hash = mixed(hash, p.reader_quantizes);
  return mixed(hash, pushes);
}

}  // namespace

DeviceWorkspace device_workspace(const WorkspaceView& view, int32_t timeout_sec,
                                 const CudaContext& context) {
  const Geometry& g = view.geometry;
  DeviceWorkspace w{};
  w.base = view.base;
  w.rank_stride = view.rank_stride;
  w.ep_rank = view.ep_rank;
  w.ep_size = g.ep_size;
  w.top_k = g.top_k;
  w.max_destinations = g.max_destinations();
  w.low_latency_tokens = g.low_latency_tokens;
  w.push_slots = g.push_slots();
  w.reach = g.spans_gpus != 0 ? Reach::kSystem : Reach::kGpu;
  w.has_rank_masks = g.has_rank_masks != 0;
  w.eplb_stats_num_experts = g.eplb_stats_num_experts;
  w.layout = WorkspaceLayout::of(g);
  w.dispatch_slot_bytes = PacketSlots::of_dispatch(g);
  w.stats_slot_bytes = PacketSlots::of_stats(g);
  w.combine_slot_bytes = PacketSlots::of_combine(g);
  w.page = context.page;
  w.timeout_ns = static_cast<uint64_t>(timeout_sec) * 1'000'000'000u;
  w.timeout_sec = timeout_sec;
  return w;
}

DispatchKernelParams kernel_params(const DispatchParams& p, const CudaContext& context) {
  const Geometry& g = p.workspace.geometry;
  DispatchKernelParams k{};
  k.workspace = device_workspace(p.workspace, p.timeout_sec, context);
  k.partition = ExpertPartition(g.num_experts, g.ep_size);
  k.active = {p.active, context.active_on_device};
  k.signature = signature_of(p);
  k.num_tokens = p.num_tokens;
  k.tokens_per_rank = p.tokens_per_rank;
  k.topk_ids = p.topk_ids;
  k.ids_are_int64 = p.ids_are_int64;
  k.ids_are_vectors = !p.ids_are_int64 &&
                      is_aligned(p.topk_ids, g.top_k * static_cast<int64_t>(sizeof(int32_t)), 0);
  k.has_weights = p.has_weights;
  k.topk_weights = p.topk_weights;
  k.invalid_expert_id = static_cast<int32_t>(p.invalid_expert_id);
  k.eplb_local_stats = p.eplb_local_stats;
  int64_t row_bytes[kMaxPayloads] = {};
  for (int32_t i = 0; i < p.num_payloads; ++i) {
    const RowsIn& rows = p.payloads[i];
    k.payloads[i] = rows;
    k.payload_is_aligned[i] = is_aligned(rows.data, rows.stride, rows.row_bytes);
    row_bytes[i] = rows.row_bytes;
    k.num_chunks += static_cast<int32_t>(row_pitch(rows.row_bytes) / kRowAlignment);
    k.chunks_end[i] = k.num_chunks;
  }
  k.num_payloads = p.num_payloads;
  k.placement = PayloadPlacement::of(g, p.tokens_per_rank, row_bytes, p.num_payloads);
  const auto chunks =
      static_cast<int32_t>(PacketSlots::chunks_of_words(static_cast<uint64_t>(g.top_k)));
  k.num_chunks += p.has_weights ? 2 * chunks : chunks;
  k.out_topk_ids = p.out_topk_ids;
  k.out_topk_weights = p.out_topk_weights;
  k.out_recv_counts = p.out_recv_counts;
  k.out_eplb_stats = p.out_eplb_stats;
  return k;
}

CombineKernelParams kernel_params(const CombineParams& p, const CudaContext& context) {
  CombineKernelParams k{};
  k.workspace = device_workspace(p.workspace, p.timeout_sec, context);
  k.signature = signature_of(p);
  k.num_tokens = p.num_tokens;
  k.tokens_per_rank = p.tokens_per_rank;
  k.hidden_size = p.hidden_size;
  k.row_type = p.row_type;
  k.row_bytes = p.hidden_size * row_type_bytes(p.row_type);
  k.pitch = travelling_row_pitch(p);
  k.expert_output = p.expert_output;
  k.expert_output_stride = p.expert_output_stride;
  k.expert_output_is_aligned = is_aligned(p.expert_output, p.expert_output_stride, k.row_bytes);
  k.output = p.output;
  k.output_is_aligned = is_aligned(p.output, 0, k.row_bytes);
  k.reader_quantizes = p.reader_quantizes;
  k.output_is_quantized = p.quantized != nullptr;
  if (k.output_is_quantized) k.quantized = *p.quantized;
  return k;
}

cudaError_t multiprocessors_to_fill(int* count) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  // Under MPS the shares of several ranks overlap by some 12 %. Where a grid is as large as the
  // share, CTAs of two ranks want the same multiprocessor, and those that come second start when
  // the first have ended: one such CTA cost 7 us. Without them, 4096 tokens take as long as before.
  *count -= *count / 8;
  return cudaSuccess;
}

cudaError_t initialize_on_device(const WorkspaceView& workspace, cudaStream_t stream) {
  const WorkspaceLayout layout = WorkspaceLayout::of(workspace.geometry);
  uint8_t* segment = workspace.segment(workspace.ep_rank);
  const cudaError_t error = cudaMemsetAsync(segment, 0, layout.end_of_control(), stream);
  if (error != cudaSuccess) return error;
  const uint64_t flags = layout.row_flags.offset;
  return cudaMemsetAsync(segment + flags, 0, layout.segment_bytes - flags, stream);
}

}  // namespace moe_ep::one_sided
