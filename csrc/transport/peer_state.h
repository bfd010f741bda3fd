// What a rank that waits long may see of its peers: a round that they have begun with another mask,
// a wait that they have given up, that they have left, the end of their process. All of it is in
// the control block of the peer, which is read only, and only now and then.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "core/atomics.h"
#include "core/process_identity.h"
#include "core/rank_mask.h"
#include "core/workspace_layout.h"

namespace moe_ep {

// Why a peer will not answer.
struct Obstacle {
  Missed why;
  int32_t first_missed;
  Missed first_why;
};

using MaskWord = std::atomic_ref<uint64_t>;

// For as long as a rank is in a dispatch.
class Sending {
 public:
  explicit Sending(ControlBlock& control) : word_(control.is_sending) {
    word_.store(1, kSequential);
  }
  ~Sending() { word_.store(0, kRelease); }
  Sending(const Sending&) = delete;
  Sending& operator=(const Sending&) = delete;

 private:
  Atomic32 word_;
};

// A rank first says with whom it begins a round, and then looks at what the others say, before it
// writes to any of them. All of it is sequentially consistent: of two ranks that begin a round, one
// with the other and one without, at least one sees that.
inline void begin_round(ControlBlock& control, const RankMask& active) {
  for (int32_t i = 0; i < rank_mask_words(kMaxEpSize); ++i) {
    MaskWord(control.active.words[i]).store(active.words[i]);
  }
  Atomic32(control.epoch).store(control.epoch + 1, kSequential);
}

// With whom a rank has begun its last round; empty before the first.
inline RankMask mask_of(ControlBlock& rank) {
  RankMask mask;
  for (int32_t i = 0; i < rank_mask_words(kMaxEpSize); ++i) {
    mask.words[i] = MaskWord(rank.active.words[i]).load();
  }
  return mask;
}

// Whether a peer has masked this rank off. To come back takes a new beginning, so any round tells.
inline bool excludes(ControlBlock& peer, int32_t peer_rank, int32_t own_rank) {
  const RankMask mask = mask_of(peer);
  return mask.contains(peer_rank) && !mask.contains(own_rank);
}

// Whether a rank that this one has masked off may be writing into its memory.
inline bool intrudes(ControlBlock& masked, int32_t own_rank) {
  return Atomic32(masked.is_sending).load(kSequential) != 0 && mask_of(masked).contains(own_rank) &&
         load_acquire(&masked.timeout.recorded) == 0 && !has_ended(masked.process);
}

// Tells peers that wait for this rank, or will, that it comes to no further round.
inline void leave(ControlBlock& control) { store_release(&control.has_left, 1); }

// What headers carry of a mask. Up to 32 ranks it is the mask.
inline uint32_t signature_of(const RankMask& mask) {
  uint64_t hash = 0;
  for (int32_t i = rank_mask_words(kMaxEpSize); i-- > 0;) {
    hash = hash * 0x9e3779b97f4a7c15u + mask.words[i];
  }
  return static_cast<uint32_t>(hash ^ (hash >> 32));
}

// What keeps `peer`, whom this rank waits for, from answering; nothing where it may just be slow.
// The caller looks once more whether it has answered: it may have done so before.
inline std::optional<Obstacle> obstacle_of(ControlBlock& peer, int32_t peer_rank,
                                           int32_t own_rank) {
  if (load_acquire(&peer.timeout.recorded) != 0) {
    return Obstacle{Missed::kPeerGaveUp, peer.timeout.first_missed, peer.timeout.first_why};
  }
  if (load_acquire(&peer.has_left) != 0) {
    return Obstacle{Missed::kDestroyed, peer_rank, Missed::kDestroyed};
  }
  if (has_ended(peer.process)) {
    return Obstacle{Missed::kProcessEnded, peer_rank, Missed::kProcessEnded};
  }
  if (excludes(peer, peer_rank, own_rank)) {
    return Obstacle{Missed::kMasksDiffer, peer_rank, Missed::kMasksDiffer};
  }
  return std::nullopt;
}

}  // namespace moe_ep
