// The end of a round in which a rank has no expert outputs for its peers, on any transport. No row
// moves: all ranks learn of it where they meet in combine.
#pragma once

#include <cstdint>

#include "transport/agreement.h"

namespace moe_ep {

// What `ask` makes of the Agreement of the ranks that have met in the dispatch of this round.
template <typename Segment, typename Layout, typename Workspace, typename Ask>
auto ask_in_combine(const Workspace& workspace, int32_t timeout_sec, Ask ask) {
  const Layout layout = Layout::of(workspace.geometry);
  const auto segment_of = [&](int32_t rank) { return Segment(workspace, layout, rank); };
  const RankMask& active = segment_of(workspace.ep_rank).control().active;
  const PeerWait how{workspace.geometry.ep_size, active, Phase::kCombine, timeout_sec,
                     workspace.interrupted};
  return ask(Agreement(how, workspace.ep_rank, segment_of));
}

template <typename Segment, typename Layout, typename Workspace>
Outcome abandon_round(const Workspace& workspace, int32_t timeout_sec) {
  return ask_in_combine<Segment, Layout>(workspace, timeout_sec,
                                         [](const auto& agreement) { return agreement.abandon(); });
}

template <typename Segment, typename Layout, typename Workspace>
RankMask ranks_that_abandoned(const Workspace& workspace) {
  return ask_in_combine<Segment, Layout>(
      workspace, 0, [](const auto& agreement) { return agreement.who_abandoned(); });
}

}  // namespace moe_ep
