// Ops on a two-sided workspace outside the exchange: initialise it, raise what a round recorded.
#include <torch/csrc/stable/library.h>

#include "ops/errors.h"
#include "ops/missed_peers.h"
#include "ops/round_errors.h"
#include "ops/two_sided_args.h"
#include "ops/two_sided_host.h"
#include "two_sided/cpu.h"

namespace moe_ep::ops {
namespace {

void two_sided_initialize(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  const two_sided::WorkspaceView view = two_sided_workspace(workspace, geometry, ep_rank);
  check(view.geometry.num_channels == 1, "num_channels must be 1 on the CPU, got ",
        view.geometry.num_channels);
  two_sided::initialize(view);
}

void two_sided_check(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  const two_sided::WorkspaceView view = two_sided_workspace(workspace, geometry, ep_rank);
  auto& control = *reinterpret_cast<ControlBlock*>(view.segment(view.ep_rank));
  if (control.timeout.recorded) raise_missed(rows_of(view));
  const InvalidIdRecord invalid = initialised_control(view).invalid_id;
  control.invalid_id.count = 0;
  if (invalid.count != 0) raise_invalid_ids(invalid, view.ep_rank);
}

// Nothing is kept about a workspace on the CPU.
void two_sided_forget(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  two_sided_workspace(workspace, geometry, ep_rank);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) {
  m.impl("two_sided_initialize", TORCH_BOX(&two_sided_initialize));
  m.impl("two_sided_check", TORCH_BOX(&two_sided_check));
  m.impl("two_sided_forget", TORCH_BOX(&two_sided_forget));
}

}  // namespace moe_ep::ops
