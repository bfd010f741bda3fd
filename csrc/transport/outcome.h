// How a call of a transport between CPU ranks ends.
#pragma once

namespace moe_ep {

enum class Outcome {
  kDone,
  // The ranks are out of step, and the workspace cannot be used any more; ControlBlock::timeout
  // says on whom this rank waited.
  kTimeout,
  kInterrupted,
  // The ranks called with different arguments, and all of them know. The round is closed.
  kDisagreement,
  // In combine a rank had no rows, and all know which. The round is closed, without sums.
  kAbandoned,
};

}  // namespace moe_ep
