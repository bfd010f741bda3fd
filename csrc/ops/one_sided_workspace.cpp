// Ops on a one-sided workspace outside the exchange: initialise it, read received rows, raise what
// a round recorded.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "one_sided/cpu.h"
#include "ops/errors.h"
#include "ops/missed_peers.h"
#include "ops/one_sided_backends.h"
#include "ops/round_errors.h"
#include "ops/workspace_args.h"

namespace moe_ep::ops {
namespace {

void initialize(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  one_sided::initialize(workspace_from(workspace, geometry_from(geometry), ep_rank));
}

// A fresh copy of one payload's received rows. Compiled graphs use it in place of a view: a value
// that the graph keeps past the next dispatch then stays right, and the workspace is never cloned
// for it.
Tensor received_rows(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank,
                     int64_t tokens_per_rank, std::vector<int64_t> row_bytes, int64_t index,
                     ScalarType dtype) {
  const one_sided::WorkspaceView view = workspace_from(workspace, geometry_from(geometry), ep_rank);
  const Geometry& g = view.geometry;
  const PayloadPlacement placement = placement_from(g, tokens_per_rank, row_bytes, index);
  const ControlBlock& control = initialised_control(view);
  check_state(control.phase == Phase::kDispatch && control.tokens_per_rank == tokens_per_rank,
              "received rows can be read between the dispatch they belong to and its combine only");
  const WorkspaceLayout layout = WorkspaceLayout::of(g);
  const one_sided::Segment own(view, layout, view.ep_rank);
  const RoundHeader& header = own.round_header(view.ep_rank);
  for (size_t i = 0; i < row_bytes.size(); ++i) {
    check(header.row_bytes[i] == row_bytes[i], "payload ", i, " has rows of ", header.row_bytes[i],
          " bytes in this round, got ", row_bytes[i]);
  }
  const auto row = static_cast<size_t>(row_bytes[index]);
  const int64_t columns = columns_of(row_bytes[index], dtype);
  Tensor rows = torch::stable::empty({g.ep_size * tokens_per_rank, columns}, dtype);
  auto* to = static_cast<uint8_t*>(rows.mutable_data_ptr());
  for (int32_t source = 0; source < g.ep_size; ++source) {
    // A masked source has an old header or none: its rows hold no token.
    const RoundHeader& h = own.round_header(source);
    const int64_t used = h.dispatched == control.epoch ? h.num_rows : 0;
    const int64_t first = source * tokens_per_rank;
    for (int64_t i = 0; i < used; ++i, to += row) {
      std::memcpy(to, own.payload_row(placement, static_cast<int32_t>(index), first + i), row);
    }
    const size_t empty = static_cast<size_t>(tokens_per_rank - used) * row;
    std::memset(to, 0, empty);
    to += empty;
  }
  return rows;
}

void check_workspace(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  const one_sided::WorkspaceView view = workspace_from(workspace, geometry_from(geometry), ep_rank);
  auto& control = *reinterpret_cast<ControlBlock*>(view.segment(view.ep_rank));
  if (control.timeout.recorded) raise_missed(rows_of(view));
  const InvalidIdRecord invalid = initialised_control(view).invalid_id;
  control.invalid_id.count = 0;
  if (invalid.count != 0) raise_invalid_ids(invalid, view.ep_rank);
}

// The process keeps nothing about a workspace in host memory besides the workspace itself.
void forget(Tensor /*workspace*/, std::vector<int64_t> /*geometry*/, int64_t /*ep_rank*/) {}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) {
  implement_for_each(m, "initialize", TORCH_BOX(&initialize));
  implement_for_each(m, "received_rows", TORCH_BOX(&received_rows));
  implement_for_each(m, "check", TORCH_BOX(&check_workspace));
  implement_for_each(m, "forget", TORCH_BOX(&forget));
}

}  // namespace moe_ep::ops
