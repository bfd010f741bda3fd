// What the two-sided ops on CPU tensors find in the workspace itself.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "ops/two_sided_args.h"
#include "two_sided/segment.h"

namespace moe_ep::ops {

ControlBlock& initialised_control(const two_sided::WorkspaceView& workspace);

two_sided::Segment own_segment(const two_sided::WorkspaceView& workspace,
                               const two_sided::FifoLayout& layout);

// 1 between alltoallv and combine.
bool rows_are_delivered(const two_sided::WorkspaceView& workspace);

// Raises unless these are the tokens that this round's prepare returned.
const int32_t* send_tokens_of_round(const Tensor& send_tokens, const Tensor& workspace,
                                    const two_sided::WorkspaceView& view);

}  // namespace moe_ep::ops
