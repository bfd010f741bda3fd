// Ops on a cake workspace outside the exchange, and on expert ids, for CUDA tensors.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cake/cuda.h"
#include "cake/row_copies.h"
#include "ops/device_rounds.h"
#include "ops/device_workspaces.h"
#include "ops/errors.h"
#include "ops/expert_ids.h"
#include "ops/workspace_args.h"

namespace moe_ep::ops {
namespace {

void cake_initialize(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  const cake::WorkspaceView view = workspace_from(workspace, geometry_from(geometry), ep_rank);
  const CudaCall call(workspace);
  begin_initialize(view, call);
  check_cuda(cake::initialize_on_device(view, call.stream()), "initialising the workspace");
  end_initialize(view, view.base, call);
}

// As on the CPU; whether a round is open, and with which rows, is up to the caller.
Tensor cake_received_rows(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank,
                          int64_t tokens_per_rank, std::vector<int64_t> row_bytes, int64_t index) {
  const cake::WorkspaceView view = workspace_from(workspace, geometry_from(geometry), ep_rank);
  const PayloadPlacement placement =
      placement_from(view.geometry, tokens_per_rank, row_bytes, index);
  const CudaCall call(workspace);
  begin_call(view, call);
  const WorkspaceLayout layout = WorkspaceLayout::of(view.geometry);
  const uint8_t* segment = view.segment(view.ep_rank);
  Tensor rows = torch::stable::empty({view.geometry.ep_size * tokens_per_rank, row_bytes[index]},
                                     ScalarType::Byte, std::nullopt, workspace.device());
  const cake::ReceivedRows received{
      .rows = segment + placement.offset[index],
      .pitch = placement.pitch[index],
      .recv_counts = reinterpret_cast<const int32_t*>(segment + layout.recv_counts.offset),
      .ep_size = view.geometry.ep_size,
      .tokens_per_rank = static_cast<int32_t>(tokens_per_rank),
      .row_bytes = row_bytes[index],
      .out = static_cast<uint8_t*>(rows.mutable_data_ptr()),
  };
  check_cuda(cake::launch_copy_received_rows(received, call.stream()), "copying received rows");
  return rows;
}

void cake_check(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  const cake::WorkspaceView view = workspace_from(workspace, geometry_from(geometry), ep_rank);
  check_rounds(view, CudaCall(workspace));
}

void cake_forget(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  const cake::WorkspaceView view = workspace_from(workspace, geometry_from(geometry), ep_rank);
  DeviceWorkspaces::of_this_process().forget(view, CudaCall(workspace));
}

void sanitize_expert_ids(Tensor topk_ids, Tensor recv_token_counts, int64_t invalid_expert_id) {
  const SanitizeArgs a = sanitize_args(topk_ids, recv_token_counts, invalid_expert_id);
  const CudaCall call(topk_ids);
  check_cuda(cake::launch_sanitize_expert_ids(
                 {a.ids, a.counts, a.num_sources, a.tokens_per_rank, a.top_k, a.invalid_expert_id},
                 call.stream()),
             "sanitising expert ids");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CUDA, m) {
  m.impl("cake_initialize", TORCH_BOX(&cake_initialize));
  m.impl("cake_received_rows", TORCH_BOX(&cake_received_rows));
  m.impl("cake_check", TORCH_BOX(&cake_check));
  m.impl("cake_forget", TORCH_BOX(&cake_forget));
  m.impl("sanitize_expert_ids", TORCH_BOX(&sanitize_expert_ids));
}

}  // namespace moe_ep::ops
