#include "ops/missed_peers.h"

#include <torch/csrc/stable/library.h>

#include <chrono>
#include <sstream>
#include <thread>

#include "ops/errors.h"
#include "ops/round_errors.h"
#include "transport/peer_state.h"

namespace moe_ep::ops {
namespace {

// In every transport a segment begins with it.
ControlBlock& control_of(const WorkspaceRows& workspace, int64_t rank) {
  return *reinterpret_cast<ControlBlock*>(workspace.base + rank * workspace.rank_stride);
}

// Of a peer that may be about to begin the round: a disagreement is found when one is seen.
std::string words_for_mask(ControlBlock& peer, uint32_t epoch, int64_t ep_size,
                           std::chrono::steady_clock::time_point deadline) {
  for (;;) {
    if (epoch_reached(load_acquire(&peer.epoch), epoch)) return ranks_in(mask_of(peer), ep_size);
    if (has_ended(peer.process)) return "none, its process has ended";
    if (std::chrono::steady_clock::now() > deadline) return "none yet, it is not in this round";
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

[[noreturn]] void raise_masks(const WorkspaceRows& workspace) {
  ControlBlock& own = control_of(workspace, workspace.ep_rank);
  constexpr auto kPatience = std::chrono::seconds(3);  // a busy machine may be late by one
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  std::ostringstream table;
  for (int32_t rank = 0; rank < workspace.ep_size; ++rank) {
    if (!own.active.contains(rank) && rank != own.timeout.first_missed) continue;
    table << "\n  rank " << rank << ": "
          << words_for_mask(control_of(workspace, rank), own.epoch, workspace.ep_size, deadline);
  }
  raise_other_masks(own.epoch, workspace.ep_rank, table.str(), "");
}

// Of an initialised workspace of any transport.
void leave_workspace(Tensor workspace, int64_t ep_rank) {
  const auto bytes = static_cast<int64_t>(sizeof(ControlBlock));
  const WorkspaceRows rows = workspace_rows(workspace, workspace.size(0), bytes, ep_rank);
  leave(control_of(rows, ep_rank));
}

}  // namespace

void raise_missed(const WorkspaceRows& workspace) {
  const TimeoutRecord& record = control_of(workspace, workspace.ep_rank).timeout;
  if (record.why == Missed::kWentOn) {
    raise_left_behind(record, workspace.ep_rank, "no sums were formed");
  }
  if (record.first_why == Missed::kMasksDiffer) raise_masks(workspace);
  raise_timeout(record, workspace.ep_rank);
}

void raise_unless_met(Outcome outcome, const WorkspaceRows& workspace) {
  if (outcome == Outcome::kTimeout) raise_missed(workspace);
  if (outcome == Outcome::kInterrupted) raise_interrupt();
}

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) { m.impl("leave", TORCH_BOX(&leave_workspace)); }

}  // namespace moe_ep::ops
