#include "ops/workspace_args.h"

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <atomic>
#include <limits>
#include <sstream>

#include "core/geometry_check.h"
#include "ops/errors.h"
#include "ops/round_errors.h"

namespace moe_ep::ops {
namespace {

std::atomic<InterruptCheck> interrupt_check{nullptr};

}  // namespace

WorkspaceRows rows_of(const one_sided::WorkspaceView& view) {
  return {view.base, view.rank_stride, view.ep_rank, view.geometry.ep_size,
          static_cast<int64_t>(WorkspaceLayout::of(view.geometry).segment_bytes)};
}

int32_t bounded(const char* name, int64_t value, int64_t low, int64_t high) {
  check(value >= low && value <= high, name, " must be in [", low, ", ", high, "], got ", value);
  return static_cast<int32_t>(value);
}

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

InterruptCheck current_interrupt_check() { return interrupt_check; }

void set_interrupt_check(int64_t address) {
  interrupt_check = reinterpret_cast<InterruptCheck>(address);
}

Geometry geometry_from(const std::vector<int64_t>& f) {
  check(f.size() == 12, "geometry must have 12 fields, got ", f.size());
  try {
    return valid_geometry(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], f[11]);
  } catch (const std::invalid_argument& error) {
    fail("MoEEpConfigError", error.what());
  }
}

WorkspaceRows workspace_rows(const Tensor& workspace, int64_t ep_size, int64_t segment_bytes,
                             int64_t ep_rank) {
  check_dtype(workspace.scalar_type() == ScalarType::Byte, "workspace must be uint8");
  check(workspace.dim() == 2, "workspace must be 2-D [ep_size, segment_bytes], got ",
        workspace.dim(), "-D");
  check(workspace.size(0) == ep_size, "workspace must have a row for each of the ", ep_size,
        " ranks, got ", workspace.size(0));
  check(workspace.size(1) >= segment_bytes && workspace.stride(1) == 1,
        "workspace rows must be dense and of at least ", segment_bytes, " bytes, got ",
        workspace.size(1), " bytes with stride ", workspace.stride(1));
  bounded("ep_rank", ep_rank, 0, ep_size - 1);
  auto* base = static_cast<uint8_t*>(workspace.mutable_data_ptr());
  check(reinterpret_cast<uintptr_t>(base) % kFlagAlignment == 0 &&
            (ep_size == 1 || workspace.stride(0) % static_cast<int64_t>(kFlagAlignment) == 0),
        "workspace rows must start on ", kFlagAlignment, "-byte boundaries");
  return {base, workspace.stride(0), static_cast<int32_t>(ep_rank), ep_size, segment_bytes};
}

one_sided::WorkspaceView workspace_from(const Tensor& workspace, const Geometry& g,
                                        int64_t ep_rank) {
  const auto segment_bytes = static_cast<int64_t>(WorkspaceLayout::of(g).segment_bytes);
  const WorkspaceRows rows = workspace_rows(workspace, g.ep_size, segment_bytes, ep_rank);
  return {rows.base, rows.rank_stride, rows.ep_rank, g, interrupt_check};
}

void check_device(const char* name, const Tensor& tensor, const Tensor& workspace) {
  const bool same = tensor.is_cpu() ? workspace.is_cpu()
                                    : tensor.is_cuda() && workspace.is_cuda() &&
                                          tensor.get_device_index() == workspace.get_device_index();
  check(same, name, " must be on the device of the workspace");
}

void raise_not_initialised() {
  fail("MoEEpStateError",
       "the workspace was not initialised: call initialize() "
       "on every rank, then a barrier, before the first dispatch");
}

void raise_other_geometry() {
  fail("MoEEpStateError", "the workspace was initialised for another geometry");
}

void raise_copy() {
  fail("MoEEpStateError",
       "this workspace tensor is a copy of the shared one, and the peers do not write into "
       "copies. torch.compile makes such a copy when a view of the workspace is used after the "
       "next dispatch: clone() what must outlive the round, before combine. With another backend "
       "than inductor, such as aot_eager, it always does");
}

void check_initialised(const ControlBlock& control, uint64_t fingerprint) {
  if (control.magic != kWorkspaceMagic) raise_not_initialised();
  if (control.fingerprint != fingerprint) raise_other_geometry();
}

ControlBlock& initialised_control(const WorkspaceRows& workspace, uint64_t fingerprint) {
  auto& control = *reinterpret_cast<ControlBlock*>(workspace.own_segment());
  check_initialised(control, fingerprint);
  const bool is_original = control.self_address == reinterpret_cast<uint64_t>(workspace.base);
  if (workspace.ep_size > 1 && !is_original) raise_copy();
  if (control.timeout.recorded != 0) raise_timed_out_earlier(control.timeout);
  return control;
}

ControlBlock& initialised_control(const one_sided::WorkspaceView& workspace) {
  return initialised_control(rows_of(workspace), workspace.geometry.fingerprint());
}

ActiveRanks active_ranks_from(const std::optional<Tensor>& mask, const Tensor& workspace,
                              const Geometry& g, int64_t ep_rank) {
  if (!mask.has_value()) return {RankMask::all(g.ep_size), nullptr};
  check(g.has_rank_masks != 0, "active_rank_mask needs a geometry with has_rank_masks=1");
  const int32_t words = rank_mask_words(g.ep_size);
  check_dtype(mask->scalar_type() == ScalarType::UInt64, "active_rank_mask must be uint64");
  check(mask->dim() == 1 && mask->size(0) == words, "active_rank_mask must have shape [", words,
        "] for ", g.ep_size, " ranks; active_rank_mask(ranks, ep_size) makes one");
  check(words == 1 || mask->stride(0) == 1, "active_rank_mask must be contiguous");
  const auto* given = static_cast<const uint64_t*>(mask->const_data_ptr());
  if (!mask->is_cpu()) {
    check_device("active_rank_mask", *mask, workspace);
    return {{}, given};
  }
  RankMask active;
  for (int32_t rank = 0; rank < g.ep_size; ++rank) {
    if ((given[rank / kRanksPerMaskWord] >> (rank % kRanksPerMaskWord)) & 1) active.insert(rank);
  }
  const int32_t bits_of_last = g.ep_size - (words - 1) * kRanksPerMaskWord;
  check(bits_of_last == kRanksPerMaskWord || given[words - 1] >> bits_of_last == 0,
        "active_rank_mask must name ranks below ep_size=", g.ep_size, " only, got ",
        given[words - 1], " as its last word; active_rank_mask(ranks, ep_size) makes one");
  if (!active.contains(static_cast<int32_t>(ep_rank))) {
    fail("MoEEpConfigError", "active_rank_mask must contain the caller's own rank ", ep_rank,
         ", got ranks ", ranks_in(active, g.ep_size), ": a rank that is masked off makes no calls");
  }
  return {active, nullptr};
}

std::string ranks_in(const RankMask& mask, int64_t ep_size) {
  std::ostringstream ranks;
  const char* separator = "";
  for (int32_t rank = 0; rank < ep_size; ++rank) {
    if (!mask.contains(rank)) continue;
    ranks << separator << rank;
    separator = ", ";
  }
  return mask == RankMask{} ? "(none)" : ranks.str();
}

int32_t checked_timeout(int64_t timeout_sec) {
  return bounded("timeout_sec", timeout_sec, 1, kMaxTimeoutSec);
}

int32_t checked_tokens_per_rank(int64_t tokens_per_rank, const Geometry& g) {
  return bounded("tokens_per_rank", tokens_per_rank, 0, g.max_tokens_per_rank);
}

int32_t checked_invalid_expert_id(int64_t invalid_expert_id) {
  check(invalid_expert_id >= std::numeric_limits<int32_t>::min() &&
            invalid_expert_id <= std::numeric_limits<int32_t>::max(),
        "invalid_expert_id must fit int32, got ", invalid_expert_id);
  return static_cast<int32_t>(invalid_expert_id);
}

PayloadPlacement placement_from(const Geometry& g, int64_t tokens_per_rank,
                                const std::vector<int64_t>& row_bytes, int64_t index) {
  check(row_bytes.size() <= kMaxPayloads && index >= 0 &&
            index < static_cast<int64_t>(row_bytes.size()),
        "index must name one of the payloads");
  int64_t left = g.dispatch_bytes_per_token;
  for (const int64_t bytes : row_bytes) {
    check(bytes >= 0 && bytes <= left,
          "row_bytes must not be negative or more than dispatch_bytes_per_token=",
          g.dispatch_bytes_per_token, " together");
    left -= bytes;
  }
  return PayloadPlacement::of(g, checked_tokens_per_rank(tokens_per_rank, g), row_bytes.data(),
                              static_cast<int32_t>(row_bytes.size()));
}

int64_t columns_of(int64_t row_bytes, ScalarType dtype) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  const auto element =
      static_cast<int64_t>(aoti_torch_dtype_element_size(to<int32_t>(from(dtype))));
  check(row_bytes % element == 0, "rows of ", row_bytes, " bytes are not elements of ", element,
        " bytes each, which dtype has");
  return row_bytes / element;
}

void check_outside_workspace(const char* name, const Tensor& tensor,
                             const WorkspaceRows& workspace) {
  const uint8_t* end =
      workspace.base + (workspace.ep_size - 1) * workspace.rank_stride + workspace.segment_bytes;
  check(!overlaps(tensor, workspace.base, end), name,
        " must not lie in the workspace, which the "
        "peers write and read during the round. Received rows and the combine input buffer are "
        "valid until combine only: clone() what must outlive it.");
}

void check_outside_workspace(const char* name, const Tensor& tensor,
                             const one_sided::WorkspaceView& workspace) {
  check_outside_workspace(name, tensor, rows_of(workspace));
}

bool is_combine_input(const Tensor& rows, const one_sided::WorkspaceView& workspace) {
  const WorkspaceLayout layout = WorkspaceLayout::of(workspace.geometry);
  const uint8_t* begin = workspace.segment(workspace.ep_rank) + layout.combine_rows.offset;
  const uint64_t bytes = WorkspaceLayout::combine_rows_bytes(workspace.geometry);
  if (!overlaps(rows, begin, begin + bytes)) return false;
  const auto element = static_cast<int64_t>(rows.element_size());
  const auto pitch = static_cast<int64_t>(row_pitch(rows.size(1) * element));
  const bool in_place = rows.size(0) <= 1 || rows.stride(0) * element == pitch;
  check(in_place && rows.const_data_ptr() == begin,
        "expert_output overlaps the combine input buffer "
        "without being it: hand in a tensor of your own, or the buffer itself where combine takes "
        "it");
  return true;
}

}  // namespace moe_ep::ops
