// What went wrong in a round, in words: one text for the CPU, which finds it in the call itself,
// and for CUDA, where a kernel recorded it.
#pragma once

#include <cstdint>
#include <string>

#include "core/rank_mask.h"
#include "core/status.h"
#include "core/workspace_layout.h"

namespace moe_ep::ops {

// The end of what is said to a call that an open round refuses.
inline constexpr const char* kEndsOpenRound =
    ". Where an exception has come between, abandon_round of the communication ends the round";

// MoEEpInputError; record.count must not be 0.
[[noreturn]] void raise_invalid_ids(const InvalidIdRecord& record, int32_t ep_rank);
[[noreturn]] void raise_timeout(const TimeoutRecord& record, int32_t ep_rank);
// For every call after that one.
[[noreturn]] void raise_timed_out_earlier(const TimeoutRecord& record);
[[noreturn]] void raise_interrupt();
// MoEEpMaskDisagreementError. masks: of which ranks, in words, each behind a new line. before: what
// is to be said of the round before.
[[noreturn]] void raise_other_masks(uint32_t epoch, int64_t ep_rank, const std::string& masks,
                                    const char* before);
// The same, of a rank that others went on without. sums: what became of its own.
[[noreturn]] void raise_left_behind(const TimeoutRecord& record, int64_t ep_rank, const char* sums);

// headers: [ep_size], what each rank said; zeros where it said nothing.
[[noreturn]] void raise_dispatch_disagreement(const RoundHeader* headers, int32_t ep_size);
// The same in a round of a batch that all ranks should hold.
[[noreturn]] void raise_batch_disagreement(const RoundHeader* headers, int32_t ep_size);
// expert_outputs: those that this rank gave, in words; may be empty.
[[noreturn]] void raise_combine_disagreement(const std::string& expert_outputs);
// ranks: those that had no expert outputs.
[[noreturn]] void raise_abandoned(const RankMask& ranks, int32_t ep_size);

}  // namespace moe_ep::ops
