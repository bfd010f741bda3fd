#include "ops/two_sided_args.h"

#include <numeric>
#include <stdexcept>

#include "ops/errors.h"
#include "ops/missed_peers.h"
#include "ops/round_errors.h"
#include "two_sided/cpu.h"

namespace moe_ep::ops {
namespace {

two_sided::Geometry geometry_of_fifos(const std::vector<int64_t>& f) {
  check(f.size() == 6, "geometry must have 6 fields, got ", f.size());
  try {
    return two_sided::valid_geometry(f[0], f[1], f[2], f[3], f[4], f[5]);
  } catch (const std::invalid_argument& error) {
    fail("MoEEpConfigError", error.what());
  }
}

}  // namespace

WorkspaceRows rows_of(const two_sided::WorkspaceView& view) {
  return {view.base, view.rank_stride, view.ep_rank, view.geometry.ep_size,
          static_cast<int64_t>(two_sided::FifoLayout::of(view.geometry).segment_bytes)};
}

two_sided::WorkspaceView two_sided_workspace(const Tensor& workspace,
                                             const std::vector<int64_t>& geometry,
                                             int64_t ep_rank) {
  const two_sided::Geometry g = geometry_of_fifos(geometry);
  const auto segment_bytes = static_cast<int64_t>(two_sided::FifoLayout::of(g).segment_bytes);
  const WorkspaceRows rows = workspace_rows(workspace, g.ep_size, segment_bytes, ep_rank);
  return {rows.base, rows.rank_stride, rows.ep_rank, g, current_interrupt_check()};
}

ControlBlock& initialised_control(const two_sided::WorkspaceView& workspace) {
  return initialised_control(rows_of(workspace), workspace.geometry.fingerprint());
}

void check_outside_workspace(const char* name, const Tensor& tensor,
                             const two_sided::WorkspaceView& workspace) {
  check_outside_workspace(name, tensor, rows_of(workspace));
}

two_sided::RoundState& round_state_of(const two_sided::WorkspaceView& workspace) {
  const two_sided::FifoLayout layout = two_sided::FifoLayout::of(workspace.geometry);
  return two_sided::Segment(workspace, layout, workspace.ep_rank).round_state();
}

const int32_t* send_tokens_from(const Tensor& send_tokens,
                                const two_sided::WorkspaceView& workspace) {
  check_outside_workspace("send_tokens", send_tokens, workspace);
  check_dtype(send_tokens.scalar_type() == ScalarType::Int, "send_tokens must be int32");
  check(send_tokens.is_cpu() && send_tokens.dim() == 1 && send_tokens.is_contiguous(),
        "send_tokens must be contiguous and 1-D, on the CPU");
  const two_sided::FifoLayout layout = two_sided::FifoLayout::of(workspace.geometry);
  const two_sided::Segment own(workspace, layout, workspace.ep_rank);
  const int32_t* counts = own.send_counts();
  const int64_t count = std::accumulate(counts, counts + workspace.geometry.ep_size, int64_t{0});
  const auto* tokens = static_cast<const int32_t*>(send_tokens.const_data_ptr());
  const bool same = send_tokens.size(0) >= count &&
                    two_sided::hash_of_tokens(tokens, count) == own.round_state().send_tokens_hash;
  check(same, "send_tokens must be what prepare returned in this round");
  return tokens;
}

void raise_unless_met(Outcome outcome, const two_sided::WorkspaceView& workspace) {
  if (outcome == Outcome::kTimeout) raise_missed(rows_of(workspace));
  if (outcome == Outcome::kInterrupted) raise_interrupt();
}

}  // namespace moe_ep::ops
