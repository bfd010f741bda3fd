#include "ops/workspace_args.h"

#include <atomic>
#include <limits>

#include "core/geometry_check.h"
#include "ops/errors.h"

namespace moe_ep::ops {
namespace {

int32_t bounded(const char* name, int64_t value, int64_t low, int64_t high) {
  check(value >= low && value <= high, name, " must be in [", low, ", ", high, "], got ", value);
  return static_cast<int32_t>(value);
}

// The bytes from the first to the last element; false where there is none.
bool overlaps(const Tensor& tensor, const uint8_t* begin, const uint8_t* end) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 0) return false;
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const auto* first = static_cast<const uint8_t*>(tensor.const_data_ptr());
  const auto element = static_cast<int64_t>(tensor.element_size());
  return first < end && first + (last + 1) * element > begin;
}

std::atomic<InterruptCheck> interrupt_check{nullptr};

}  // namespace

void set_interrupt_check(int64_t address) {
  interrupt_check = reinterpret_cast<InterruptCheck>(address);
}

Geometry geometry_from(const std::vector<int64_t>& f) {
  check(f.size() == 7, "geometry must have 7 fields, got ", f.size());
  try {
    return valid_geometry(f[0], f[1], f[2], f[3], f[4], f[5], f[6]);
  } catch (const std::invalid_argument& error) {
    fail("MoEEpConfigError", error.what());
  }
}

cake::WorkspaceView workspace_from(const Tensor& workspace, const Geometry& g, int64_t ep_rank) {
  check_dtype(workspace.scalar_type() == ScalarType::Byte, "workspace must be uint8");
  check(workspace.dim() == 2, "workspace must be 2-D [ep_size, segment_bytes], got ",
        workspace.dim(), "-D");
  check(workspace.size(0) == g.ep_size, "workspace must have a row for each of the ", g.ep_size,
        " ranks, got ", workspace.size(0));
  const auto segment_bytes = static_cast<int64_t>(WorkspaceLayout::of(g).segment_bytes);
  check(workspace.size(1) >= segment_bytes && workspace.stride(1) == 1,
        "workspace rows must be dense and of at least ", segment_bytes, " bytes, got ",
        workspace.size(1), " bytes with stride ", workspace.stride(1));
  bounded("ep_rank", ep_rank, 0, g.ep_size - 1);
  auto* base = static_cast<uint8_t*>(workspace.mutable_data_ptr());
  check(reinterpret_cast<uintptr_t>(base) % kFlagAlignment == 0 &&
            (g.ep_size == 1 || workspace.stride(0) % static_cast<int64_t>(kFlagAlignment) == 0),
        "workspace rows must start on ", kFlagAlignment, "-byte boundaries");
  return {base, workspace.stride(0), static_cast<int32_t>(ep_rank), g, interrupt_check};
}

ControlBlock& initialised_control(const cake::WorkspaceView& workspace) {
  auto& control = *reinterpret_cast<ControlBlock*>(workspace.segment(workspace.ep_rank));
  check_state(control.magic == kWorkspaceMagic,
              "the workspace was not initialised: call initialize() "
              "on every rank, then a barrier, before the first dispatch");
  check_state(control.fingerprint == workspace.geometry.fingerprint(),
              "the workspace was initialised for another geometry");
  check_state(
      workspace.geometry.ep_size == 1 ||
          control.self_address == reinterpret_cast<uint64_t>(workspace.base),
      "this workspace tensor is a copy of the shared one, and the peers do not write into "
      "copies. torch.compile makes such a copy when a view of the workspace is used after the "
      "next dispatch: clone() what must outlive the round, before combine");
  check_state(
      control.timeout.recorded == 0, "a wait on rank ", control.timeout.peer,
      " timed out earlier, so the ranks are out of step: destroy this communication and create "
      "it again, without that rank if it is dead");
  return control;
}

RankMask active_ranks_from(const std::optional<Tensor>& mask, const Geometry& g, int64_t ep_rank) {
  if (!mask.has_value()) return RankMask::all(g.ep_size);
  const int32_t words = rank_mask_words(g.ep_size);
  check_dtype(mask->scalar_type() == ScalarType::UInt64, "active_rank_mask must be uint64");
  check(mask->dim() == 1 && mask->size(0) == words, "active_rank_mask must have shape [", words,
        "] for ", g.ep_size, " ranks; active_rank_mask(ranks, ep_size) makes one");
  check(words == 1 || mask->stride(0) == 1, "active_rank_mask must be contiguous");
  const auto* given = static_cast<const uint64_t*>(mask->const_data_ptr());
  RankMask active;
  for (int32_t rank = 0; rank < g.ep_size; ++rank) {
    if ((given[rank / kRanksPerMaskWord] >> (rank % kRanksPerMaskWord)) & 1) active.insert(rank);
  }
  const int32_t bits_of_last = g.ep_size - (words - 1) * kRanksPerMaskWord;
  check(bits_of_last == kRanksPerMaskWord || given[words - 1] >> bits_of_last == 0,
        "active_rank_mask must name ranks below ep_size=", g.ep_size, " only");
  check(active.contains(static_cast<int32_t>(ep_rank)),
        "active_rank_mask must contain the caller's own rank ", ep_rank);
  return active;
}

int32_t checked_timeout(int64_t timeout_sec) {
  return bounded("timeout_sec", timeout_sec, 1, kMaxTimeoutSec);
}

int32_t checked_tokens_per_rank(int64_t tokens_per_rank, const Geometry& g) {
  return bounded("tokens_per_rank", tokens_per_rank, 0, g.max_tokens_per_rank);
}

void raise_invalid_ids(ControlBlock& control, const cake::WorkspaceView& workspace) {
  const InvalidIdRecord record = control.invalid_id;
  control.invalid_id.count = 0;
  if (record.count == 0) return;
  fail("MoEEpInputError", "rank ", workspace.ep_rank, " passed ", record.count,
       " expert id(s) outside [0, ", workspace.geometry.num_experts, "), the first at token ",
       record.token, ", slot ", record.slot, ": ", record.expert_id,
       ". These slots were skipped. Use a negative id or invalid_expert_id for padding.");
}

void raise_timeout(const ControlBlock& control, const cake::WorkspaceView& workspace) {
  const TimeoutRecord& record = control.timeout;
  if (epoch_reached(record.epoch_seen, record.epoch_expected)) {
    fail("MoEEpTimeoutError", "rank ", workspace.ep_rank, " met rank ", record.peer, " in ",
         phase_name(record.phase), " of another round (epoch ", record.epoch_expected,
         " expected, ", record.epoch_seen,
         " seen): a call failed on one of them only. Re-create the "
         "communication on all ranks.");
  }
  fail("MoEEpTimeoutError", "rank ", workspace.ep_rank, " waited ", record.timeout_sec, " s in ",
       phase_name(record.phase), " for rank ", record.peer, " (epoch ", record.epoch_expected,
       " expected, ", record.epoch_seen, " seen). Rank ", record.peer,
       " may be dead, slow, or in another number of rounds; mask it or re-create the "
       "communication.");
}

void raise_interrupt() {
  fail("Interrupted",
       "a signal handler ended the wait; the round is lost, re-create the "
       "communication on all ranks");
}

void check_outside_workspace(const char* name, const Tensor& tensor,
                             const cake::WorkspaceView& workspace) {
  const uint8_t* end = workspace.segment(workspace.geometry.ep_size - 1) +
                       WorkspaceLayout::of(workspace.geometry).segment_bytes;
  check(!overlaps(tensor, workspace.base, end), name,
        " must not lie in the workspace, which the "
        "peers write and read during the round. Received rows and the combine input buffer are "
        "valid until combine only: clone() what must outlive it.");
}

bool is_combine_input(const Tensor& rows, const cake::WorkspaceView& workspace) {
  const WorkspaceLayout layout = WorkspaceLayout::of(workspace.geometry);
  const uint8_t* begin = workspace.segment(workspace.ep_rank) + layout.combine_rows.offset;
  if (!overlaps(rows, begin, begin + layout.combine_rows.bytes)) return false;
  const bool dense = rows.size(0) <= 1 || rows.stride(0) == rows.size(1);
  check(dense && rows.const_data_ptr() == begin,
        "expert_output overlaps the combine input buffer "
        "without being it: hand in the buffer itself, or a tensor of your own");
  return true;
}

}  // namespace moe_ep::ops
