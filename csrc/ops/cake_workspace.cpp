// Ops on a cake workspace outside the exchange: initialise it, read received rows, raise what a
// round recorded.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "cake/cpu.h"
#include "ops/errors.h"
#include "ops/workspace_args.h"

namespace moe_ep::ops {
namespace {

void cake_initialize(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  cake::initialize(workspace_from(workspace, geometry_from(geometry), ep_rank));
}

// A fresh copy of one payload's received rows. Compiled graphs use it in place of a view: a value
// that the graph keeps past the next dispatch then stays right, and the workspace is never cloned
// for it.
Tensor cake_received_rows(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank,
                          int64_t tokens_per_rank, std::vector<int64_t> row_bytes, int64_t index) {
  const cake::WorkspaceView view = workspace_from(workspace, geometry_from(geometry), ep_rank);
  const Geometry& g = view.geometry;
  check(row_bytes.size() <= kMaxPayloads && index >= 0 &&
            index < static_cast<int64_t>(row_bytes.size()),
        "index must name one of the payloads");
  const ControlBlock& control = initialised_control(view);
  check_state(control.phase == Phase::kDispatch && control.tokens_per_rank == tokens_per_rank,
              "received rows can be read between the dispatch they belong to and its combine only");
  const WorkspaceLayout layout = WorkspaceLayout::of(g);
  const cake::Segment own(view, layout, view.ep_rank);
  const RoundHeader& header = own.round_header(view.ep_rank);
  for (size_t i = 0; i < row_bytes.size(); ++i) {
    check(header.row_bytes[i] == row_bytes[i], "payload ", i, " has rows of ", header.row_bytes[i],
          " bytes in this round, got ", row_bytes[i]);
  }
  const PayloadPlacement placement = PayloadPlacement::of(g, tokens_per_rank, row_bytes.data(),
                                                          static_cast<int32_t>(row_bytes.size()));
  const size_t block = static_cast<size_t>(tokens_per_rank * row_bytes[index]);
  Tensor rows =
      torch::stable::empty({g.ep_size * tokens_per_rank, row_bytes[index]}, ScalarType::Byte);
  auto* to = static_cast<uint8_t*>(rows.mutable_data_ptr());
  const uint8_t* from = own.bytes(placement.offset[index]);
  for (int32_t source = 0; source < g.ep_size; ++source, to += block, from += block) {
    // A masked source has an old header or none: its rows hold no token.
    const RoundHeader& h = own.round_header(source);
    const size_t used =
        h.dispatched == control.epoch ? static_cast<size_t>(h.num_rows * row_bytes[index]) : 0;
    std::memcpy(to, from, used);
    std::memset(to + used, 0, block - used);
  }
  return rows;
}

void cake_check(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  const cake::WorkspaceView view = workspace_from(workspace, geometry_from(geometry), ep_rank);
  auto& control = *reinterpret_cast<ControlBlock*>(view.segment(view.ep_rank));
  if (control.timeout.recorded) raise_timeout(control, view);
  raise_invalid_ids(initialised_control(view), view);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) {
  m.impl("cake_initialize", TORCH_BOX(&cake_initialize));
  m.impl("cake_received_rows", TORCH_BOX(&cake_received_rows));
  m.impl("cake_check", TORCH_BOX(&cake_check));
}

}  // namespace moe_ep::ops
