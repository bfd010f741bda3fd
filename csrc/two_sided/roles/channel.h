// What the warps of a channel know and do alike. They are written for any machine: `csrc/two_sided`
// has that of CUDA, tests/native one of threads.
//
// A Machine is one warp. It has
//   kLanes; lane(), static; ballot(bool); from_lane(value, lane); least(int32_t), of all lanes
//   lowest(bits), count(bits)        of a ballot: the number of the lowest bit, how many there are
//   sync()                           the lanes wait for each other, and see what all have written
//   poll(word)                       acquire
//   peek(word)                       counts as seen at the next `fence`
//   fence()                          acquires what was peeked; releases what all lanes did before
//                                    the last `sync` to those who see what is posted behind it
//   post(word, value)                behind a `fence`
//   drop_load()                      what is being loaded is not wanted: there is room for other
//                                    loads, and none is under way
//   row_list()                       of kMaxTopK, for all lanes
//   moved()                          what it waited for has come: the next wait has a new deadline
//   counts_to_look()                 counts a look that brought nothing; true: ask has_run_out
//   has_run_out(peer)                whether the deadline has passed, which then is recorded
// and the copies that the roles name.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/limits.h"
#include "two_sided/channels.h"
#include "two_sided/segment.h"

namespace moe_ep::two_sided {

struct Channel {
  const WorkspaceView& workspace;
  const FifoLayout& layout;
  const StreamPlan& plan;
  const int32_t* send_tokens;
  int32_t number;

  MOE_EP_ON_DEVICE int32_t ep_size() const { return workspace.geometry.ep_size; }
  MOE_EP_ON_DEVICE int32_t num_slots() const { return plan.num_slots; }
  MOE_EP_ON_DEVICE Segment own() const { return {workspace, layout, workspace.ep_rank}; }
  MOE_EP_ON_DEVICE Segment at(int32_t rank) const { return {workspace, layout, rank}; }
  // What this rank's `number`-th filling for a peer goes to.
  MOE_EP_ON_DEVICE uint8_t* slot_at(int32_t peer, uint32_t filling) const {
    return slot_in(at(peer).slots(workspace.ep_rank), filling);
  }
  MOE_EP_ON_DEVICE uint8_t* slot_from(int32_t peer, uint32_t filling) const {
    return slot_in(own().slots(peer), filling);
  }
  // Numbers wrap at 2^32, which the number of slots divides.
  MOE_EP_ON_DEVICE uint8_t* slot_in(uint8_t* slots, uint32_t filling) const {
    const auto num = static_cast<uint32_t>(plan.num_slots);
    const uint32_t slot = static_cast<uint32_t>(number) * num + (filling & (num - 1));
    return slots + static_cast<int64_t>(slot) * plan.slot_pitch;
  }
  // Both ends of a FIFO poll their own memory.
  MOE_EP_ON_DEVICE uint32_t* head_at(int32_t peer) const {
    return at(peer).head(workspace.ep_rank, number);
  }
  MOE_EP_ON_DEVICE const uint32_t* head_from(int32_t peer) const {
    return own().head(peer, number);
  }
  MOE_EP_ON_DEVICE uint32_t* tail_at(int32_t peer) const {
    return at(peer).tail(workspace.ep_rank, number);
  }
  MOE_EP_ON_DEVICE const uint32_t* tail_from(int32_t peer) const {
    return own().tail(peer, number);
  }
};

// Calls visit(item) for each item of the channel until one returns false; returns whether all
// returned true.
template <typename Visit>
MOE_EP_ON_DEVICE bool for_each_item(const Channel& c, Visit visit) {
  for (int32_t i = c.number; i < c.plan.num_items(); i += c.plan.num_channels) {
    if (!visit(c.plan.item(i))) return false;
  }
  return true;
}

// The rank that a lane stands for, in one of the words of its state.
template <typename Machine>
MOE_EP_ON_DEVICE int32_t rank_of(int32_t lane, int32_t word) {
  return word * Machine::kLanes + lane;
}

// The first rank of which the lane that stands for it says yes; -1: none.
template <typename Machine, int kWords>
MOE_EP_ON_DEVICE int32_t first_rank(Machine& m, const bool (&says)[kWords]) {
  int32_t found = -1;
  for (int w = kWords - 1; w >= 0; --w) {
    const uint32_t bits = m.ballot(says[w]);
    if (bits != 0) found = rank_of<Machine>(m.lowest(bits), w);
  }
  return found;
}

// The next such rank behind `last`, going round; -1: none.
template <typename Machine, int kWords>
MOE_EP_ON_DEVICE int32_t rank_behind(Machine& m, const bool (&says)[kWords], int32_t last) {
  int32_t found = -1;
  int32_t behind = -1;
  for (int w = kWords - 1; w >= 0; --w) {
    const uint32_t bits = m.ballot(says[w]);
    const uint32_t later = m.ballot(says[w] && rank_of<Machine>(m.lane(), w) > last);
    if (bits != 0) found = rank_of<Machine>(m.lowest(bits), w);
    if (later != 0) behind = rank_of<Machine>(m.lowest(later), w);
  }
  return behind >= 0 ? behind : found;
}

}  // namespace moe_ep::two_sided
