#include "ops/two_sided_host.h"

#include <numeric>

#include "ops/errors.h"
#include "two_sided/cpu.h"

namespace moe_ep::ops {

ControlBlock& initialised_control(const two_sided::WorkspaceView& workspace) {
  return initialised_control(rows_of(workspace), workspace.geometry.fingerprint());
}

two_sided::Segment own_segment(const two_sided::WorkspaceView& workspace,
                               const two_sided::FifoLayout& layout) {
  return {workspace, layout, workspace.ep_rank};
}

bool rows_are_delivered(const two_sided::WorkspaceView& workspace) {
  const two_sided::FifoLayout layout = two_sided::FifoLayout::of(workspace.geometry);
  return own_segment(workspace, layout).round_state().rows_delivered == 1;
}

const int32_t* send_tokens_of_round(const Tensor& send_tokens, const Tensor& workspace,
                                    const two_sided::WorkspaceView& view) {
  const int32_t* tokens = send_tokens_of(send_tokens, workspace, view);
  const two_sided::FifoLayout layout = two_sided::FifoLayout::of(view.geometry);
  const two_sided::Segment own = own_segment(view, layout);
  const int32_t* counts = own.send_counts();
  const int64_t count = std::accumulate(counts, counts + view.geometry.ep_size, int64_t{0});
  const bool same = send_tokens.size(0) >= count &&
                    two_sided::hash_of_tokens(tokens, count) == own.round_state().send_tokens_hash;
  check(same, "send_tokens must be what prepare returned in this round");
  return tokens;
}

}  // namespace moe_ep::ops
