// What the two-sided ops on CUDA tensors share.
#pragma once

#include "ops/two_sided_args.h"
#include "two_sided/cuda.h"

namespace moe_ep::ops {

int32_t num_tokens_of(int64_t rows);

// Of a tensor with a row for each row that may be received.
int32_t tokens_per_rank_of(const char* name, int64_t rows, const two_sided::Geometry& geometry);

// As many as prepare returned for so many tokens. Whether they are those of this round only the
// device knows.
const int32_t* send_tokens_for(const Tensor& send_tokens, int32_t num_tokens,
                               const Tensor& workspace, const two_sided::WorkspaceView& view);

}  // namespace moe_ep::ops
