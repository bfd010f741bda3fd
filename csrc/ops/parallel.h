// Torch's thread pool, for transports that know nothing of torch.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "transport/parallel_for.h"

namespace moe_ep::ops {

inline ParallelFor torch_parallel_for() {
  return [](int64_t begin, int64_t end, int64_t grain,
            const std::function<void(int64_t, int64_t)>& body) {
    if (end - begin <= grain || torch::stable::get_num_threads() == 1) {
      if (begin < end) body(begin, end);
      return;
    }
    torch::stable::parallel_for(begin, end, grain, body);
  };
}

}  // namespace moe_ep::ops
