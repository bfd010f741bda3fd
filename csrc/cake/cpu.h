// Cake's transport between ranks that are processes (or threads) on CPUs.
#pragma once

#include <cstdint>
#include <functional>

#include "cake/params.h"

namespace moe_ep::cake {

// Runs `body(begin, end)` over chunks of [begin, end), perhaps on several threads; returns when all
// ended.
using ParallelFor = std::function<void(int64_t begin, int64_t end, int64_t grain,
                                       const std::function<void(int64_t, int64_t)>& body)>;

enum class Outcome {
  kDone,
  kTimeout,       // ControlBlock::timeout says on whom; the workspace cannot be used any more
  kDisagreement,  // the round headers differ; the round was closed on all ranks
};

// Zeroes this rank's control state. The other ranks may signal only after all ranks have done this.
void initialize(const WorkspaceView& workspace);

Outcome dispatch(const DispatchParams& params, const ParallelFor& parallel_for);
Outcome combine(const CombineParams& params, const ParallelFor& parallel_for);

}  // namespace moe_ep::cake
