// What dispatch gets and gives, on every device.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "ops/workspace_args.h"

namespace moe_ep::ops {

// The arguments of the dispatch ops, in the order of their schemas.
struct DispatchInputs {
  const Tensor& workspace;
  const Tensor& topk_ids;
  const std::optional<Tensor>& topk_weights;
  const std::vector<Tensor>& payloads;
  const std::optional<Tensor>& eplb_local_stats;
  const std::optional<Tensor>& active_rank_mask;
  const std::vector<int64_t>& geometry;
  int64_t ep_rank;
  int64_t invalid_expert_id;
  int64_t tokens_per_rank;
  int64_t timeout_sec;
};

struct DispatchArgs {
  one_sided::DispatchParams params;
  const uint64_t* active_on_device;  // null: params.active
};

// Everything but the outputs. Raises where an argument is wrong; looks at no memory of the
// workspace.
DispatchArgs dispatch_args(const DispatchInputs& inputs);

using DispatchOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;
// Ids, weights, counts and statistics as new tensors; what was not given has no elements.
DispatchOutputs fresh_outputs(one_sided::DispatchParams& params, const Tensor& workspace);
// They stay where the peers write them.
void leave_in_workspace(one_sided::DispatchParams& params);

}  // namespace moe_ep::ops
