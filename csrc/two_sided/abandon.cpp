// The end of a round in which a rank has no expert outputs for its peers. No row moves: senders and
// receivers all learn of it before they touch a FIFO.
#include "transport/agreement.h"
#include "two_sided/cpu.h"
#include "two_sided/segment.h"

namespace moe_ep::two_sided {
namespace {

template <typename Ask>
auto ask(const WorkspaceView& workspace, int32_t timeout_sec, Ask what) {
  const Geometry& g = workspace.geometry;
  const FifoLayout layout = FifoLayout::of(g);
  const PeerWait how{g.ep_size, RankMask::all(g.ep_size), Phase::kCombine, timeout_sec,
                     workspace.interrupted};
  const auto segment_of = [&](int32_t rank) { return Segment(workspace, layout, rank); };
  return what(Agreement(how, workspace.ep_rank, segment_of));
}

}  // namespace

Outcome abandon(const WorkspaceView& workspace, int32_t timeout_sec) {
  return ask(workspace, timeout_sec, [](const auto& agreement) { return agreement.abandon(); });
}

RankMask who_abandoned(const WorkspaceView& workspace) {
  return ask(workspace, 0, [](const auto& agreement) { return agreement.who_abandoned(); });
}

}  // namespace moe_ep::two_sided
