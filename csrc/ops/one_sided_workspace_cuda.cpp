// Ops on a one-sided workspace outside the exchange, and on expert ids, for CUDA tensors.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "one_sided/cuda.h"
#include "one_sided/row_copies.h"
#include "ops/device_rounds.h"
#include "ops/device_workspaces.h"
#include "ops/errors.h"
#include "ops/expert_ids.h"
#include "ops/one_sided_backends.h"
#include "ops/workspace_args.h"

namespace moe_ep::ops {
namespace {

void initialize(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  const one_sided::WorkspaceView view = workspace_from(workspace, geometry_from(geometry), ep_rank);
  const CudaCall call(workspace);
  begin_initialize(view, call);
  check_cuda(one_sided::initialize_on_device(view, call.stream()), "initialising the workspace");
  end_initialize(view, view.base, call);
}

// As on the CPU; whether a round is open, and with which rows, is up to the caller.
Tensor received_rows(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank,
                     int64_t tokens_per_rank, std::vector<int64_t> row_bytes, int64_t index,
                     ScalarType dtype) {
  const one_sided::WorkspaceView view = workspace_from(workspace, geometry_from(geometry), ep_rank);
  const PayloadPlacement placement =
      placement_from(view.geometry, tokens_per_rank, row_bytes, index);
  const CudaCall call(workspace);
  begin_call(view, call);
  const WorkspaceLayout layout = WorkspaceLayout::of(view.geometry);
  const uint8_t* segment = view.segment(view.ep_rank);
  const int64_t columns = columns_of(row_bytes[index], dtype);
  Tensor rows = torch::stable::empty({view.geometry.ep_size * tokens_per_rank, columns}, dtype,
                                     std::nullopt, workspace.device());
  const one_sided::ReceivedRows received{
      .rows = segment + placement.offset[index],
      .pitch = placement.pitch[index],
      .recv_counts = reinterpret_cast<const int32_t*>(segment + layout.recv_counts.offset),
      .ep_size = view.geometry.ep_size,
      .tokens_per_rank = static_cast<int32_t>(tokens_per_rank),
      .row_bytes = row_bytes[index],
      .out = static_cast<uint8_t*>(rows.mutable_data_ptr()),
  };
  check_cuda(one_sided::launch_copy_received_rows(received, call.stream()),
             "copying received rows");
  return rows;
}

void check_workspace(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  const one_sided::WorkspaceView view = workspace_from(workspace, geometry_from(geometry), ep_rank);
  const CudaCall call(workspace);
  check_rounds(view, call, [&](StatusPage* page) {
    if (view.geometry.has_rank_masks == 0) return cudaSuccess;  // nobody is left behind
    return one_sided::launch_look_around(view, page, call.stream());
  });
}

void forget(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  const one_sided::WorkspaceView view = workspace_from(workspace, geometry_from(geometry), ep_rank);
  DeviceWorkspaces::of_this_process().forget(view, CudaCall(workspace));
}

void sanitize_expert_ids(Tensor topk_ids, Tensor recv_token_counts, int64_t invalid_expert_id) {
  const SanitizeArgs a = sanitize_args(topk_ids, recv_token_counts, invalid_expert_id);
  const CudaCall call(topk_ids);
  check_cuda(one_sided::launch_sanitize_expert_ids(
                 {a.ids, a.counts, a.num_sources, a.tokens_per_rank, a.top_k, a.invalid_expert_id},
                 call.stream()),
             "sanitising expert ids");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CUDA, m) {
  implement_for_each(m, "initialize", TORCH_BOX(&initialize));
  implement_for_each(m, "received_rows", TORCH_BOX(&received_rows));
  implement_for_each(m, "check", TORCH_BOX(&check_workspace));
  implement_for_each(m, "forget", TORCH_BOX(&forget));
  m.impl("sanitize_expert_ids", TORCH_BOX(&sanitize_expert_ids));
}

}  // namespace moe_ep::ops
