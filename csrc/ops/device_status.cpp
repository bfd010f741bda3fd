#include "ops/device_status.h"

#include <atomic>
#include <sstream>
#include <string>

#include "ops/round_errors.h"
#include "ops/workspace_args.h"

namespace moe_ep::ops {
namespace {

// Kernels write the word last: where it is set, the rest of its record is there.
bool is_set(const uint32_t& word) {
  const bool set = *const_cast<const volatile uint32_t*>(&word) != 0;
  std::atomic_thread_fence(std::memory_order_acquire);
  return set;
}

void clear(uint32_t& word) {
  std::atomic_thread_fence(std::memory_order_release);
  *const_cast<volatile uint32_t*>(&word) = 0;
}

// Of those that a kernel has seen.
std::string masks_on(const StatusPage& page, const RankWorkspace& workspace) {
  std::ostringstream table;
  for (int32_t rank = 0; rank < workspace.ep_size; ++rank) {
    if (page.masks[rank] == RankMask{}) continue;
    table << "\n  rank " << rank << ": " << ranks_in(page.masks[rank], workspace.ep_size);
  }
  return table.str();
}

}  // namespace

void raise_recorded_timeout(DeviceWorkspaceState& state, const RankWorkspace& workspace) {
  if (!is_set(state.page->timeout.recorded)) return;
  if (state.timeout_was_raised) raise_timed_out_earlier(state.page->timeout);
  raise_timeout_again(state, workspace);
}

void raise_timeout_again(DeviceWorkspaceState& state, const RankWorkspace& workspace) {
  const StatusPage& page = *state.page;
  if (!is_set(page.timeout.recorded)) return;
  state.timeout_was_raised = true;
  if (page.timeout.why == Missed::kMasksDiffer) {
    raise_other_masks(page.timeout.epoch_expected, workspace.ep_rank, masks_on(page, workspace),
                      " Use no sums of a round before it that check() did not follow: ranks that "
                      "went on may have written over rows that were still being read.");
  }
  if (page.timeout.why == Missed::kWentOn) {
    raise_left_behind(page.timeout, workspace.ep_rank, "its sums must not be used");
  }
  raise_timeout(page.timeout, workspace.ep_rank);
}

RoundErrors::RoundErrors(StatusPage& page, cudaStream_t stream) {
  if (!is_set(page.disagreement.recorded) && !is_set(page.invalid_id.count)) return;
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  if (is_set(page.disagreement.recorded)) {
    disagreement_ = std::make_unique<DisagreementRecord>(page.disagreement);
    clear(page.disagreement.recorded);
  }
  if (is_set(page.invalid_id.count)) {
    invalid_id_ = page.invalid_id;
    clear(page.invalid_id.count);
  }
}

void RoundErrors::raise(const RankWorkspace& workspace) const {
  if (disagreement_ != nullptr) {
    if (disagreement_->phase == Phase::kCombine) raise_combine_disagreement("");
    raise_dispatch_disagreement(disagreement_->headers, workspace.ep_size);
  }
  if (invalid_id_.count != 0) raise_invalid_ids(invalid_id_, workspace.ep_rank);
}

}  // namespace moe_ep::ops
