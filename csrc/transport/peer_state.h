// What a rank that waits long may see of its peers: a round that they have begun with another mask,
// a wait that they have given up, the end of their process. All of it is in the control block of
// the peer, which is read only, and only now and then.
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

// The mask first: who sees the epoch sees its mask, or that of a later round.
inline void begin_round(ControlBlock& control, const RankMask& active) {
  constexpr int32_t kWords = rank_mask_words(kMaxEpSize);
  for (int32_t i = 0; i < kWords; ++i) {
    MaskWord(control.active.words[i]).store(active.words[i], std::memory_order_relaxed);
  }
  store_release(&control.epoch, control.epoch + 1);
}

// The mask of a rank that has begun a round, if it has.
inline std::optional<RankMask> mask_in_round(ControlBlock& peer, uint32_t epoch) {
  if (!epoch_reached(load_acquire(&peer.epoch), epoch)) return std::nullopt;
  RankMask mask;
  for (int32_t i = 0; i < rank_mask_words(kMaxEpSize); ++i) {
    mask.words[i] = MaskWord(peer.active.words[i]).load(std::memory_order_relaxed);
  }
  return mask;
}

// What headers carry of a mask. Up to 32 ranks it is the mask.
inline uint32_t signature_of(const RankMask& mask) {
  uint64_t hash = 0;
  for (int32_t i = rank_mask_words(kMaxEpSize); i-- > 0;) {
    hash = hash * 0x9e3779b97f4a7c15u + mask.words[i];
  }
  return static_cast<uint32_t>(hash ^ (hash >> 32));
}

// What keeps `peer`, whom this rank waits for in round `epoch`, from answering; nothing where it
// may just be slow. The caller looks once more whether it has answered: it may have done so before.
inline std::optional<Obstacle> obstacle_of(ControlBlock& peer, int32_t peer_rank, int32_t own_rank,
                                           uint32_t epoch) {
  if (load_acquire(&peer.timeout.recorded) != 0) {
    return Obstacle{Missed::kPeerGaveUp, peer.timeout.first_missed, peer.timeout.first_why};
  }
  if (has_ended(peer.process)) {
    return Obstacle{Missed::kProcessEnded, peer_rank, Missed::kProcessEnded};
  }
  const std::optional<RankMask> mask = mask_in_round(peer, epoch);
  if (mask.has_value() && !mask->contains(own_rank)) {
    return Obstacle{Missed::kMasksDiffer, peer_rank, Missed::kMasksDiffer};
  }
  return std::nullopt;
}

}  // namespace moe_ep
