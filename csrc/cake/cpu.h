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
  // The ranks are out of step, and the workspace cannot be used any more; ControlBlock::timeout
  // says on whom this rank waited.
  kTimeout,
  kInterrupted,
  // The ranks called with different arguments, and all of them know. The round is closed.
  kDisagreement,
};

// Zeroes this rank's control state. The other ranks may signal only after all ranks have done this.
void initialize(const WorkspaceView& workspace);

Outcome dispatch(const DispatchParams& params, const ParallelFor& parallel_for);
Outcome combine(const CombineParams& params, const ParallelFor& parallel_for);

}  // namespace moe_ep::cake
