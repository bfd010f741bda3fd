// How a call of a transport between CPU ranks ends.
#pragma once

#include <string>

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

// What kAbandoned means to a rank, in words. ranks: those that had no rows, as "1, 3".
inline std::string abandoned_message(const std::string& ranks) {
  return "no sums were formed, since experts raised on rank(s) " + ranks +
         ", or what stands between dispatch and combine there: see what was raised on them. The "
         "round is over on all ranks, and the next dispatch is as always.";
}

}  // namespace moe_ep
