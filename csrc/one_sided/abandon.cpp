// The end of a round in which a rank has no expert outputs for its peers.
#include "one_sided/cpu.h"
#include "one_sided/segment.h"
#include "transport/agreement.h"

namespace moe_ep::one_sided {
namespace {

template <typename Ask>
auto ask(const WorkspaceView& workspace, int32_t timeout_sec, Ask what) {
  const WorkspaceLayout layout = WorkspaceLayout::of(workspace.geometry);
  const auto segment_of = [&](int32_t rank) { return Segment(workspace, layout, rank); };
  const RankMask& active = segment_of(workspace.ep_rank).control().active;  // dispatch's
  const PeerWait how{workspace.geometry.ep_size, active, Phase::kCombine, timeout_sec,
                     workspace.interrupted};
  return what(Agreement(how, workspace.ep_rank, segment_of));
}

}  // namespace

Outcome abandon(const WorkspaceView& workspace, int32_t timeout_sec) {
  return ask(workspace, timeout_sec, [](const auto& agreement) { return agreement.abandon(); });
}

RankMask who_abandoned(const WorkspaceView& workspace) {
  return ask(workspace, 0, [](const auto& agreement) { return agreement.who_abandoned(); });
}

}  // namespace moe_ep::one_sided
