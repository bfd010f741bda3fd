// How the ranks of a CPU group meet twice a round, and find out whether they called with the same
// arguments.
//
// Each rank has a header for every source and a flag for every owner in its segment, one writer
// each. Headers are written in dispatch, flags in combine, and read after the wait for those of all
// peers. So the flags of a round are behind the reading of its headers, and the headers of the next
// round behind the reading of its flags: nothing is overwritten that somebody still reads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>

#include "core/workspace_layout.h"
#include "transport/same_call.h"
#include "transport/wait_for_peers.h"

namespace moe_ep {

// As the row type of a combine flag: the rank has no rows, and no round with such a flag has sums.
inline constexpr int32_t kAbandoned = -1;

// `SegmentOf(rank)` gives a segment with control(), round_header(source) and combine_flag(owner).
template <typename SegmentOf>
class Agreement {
 public:
  Agreement(const PeerWait& how, int32_t ep_rank, SegmentOf segment_of)
      : how_(how), ep_rank_(ep_rank), segment_of_(segment_of), control_(own().control()) {}

  // Before this rank writes to a peer: it must be in that one's mask, and nobody outside of its own
  // mask may be writing here.
  Outcome compare_masks() const {
    for (int32_t peer = 0; peer < how_.ep_size; ++peer) {
      ControlBlock& theirs = segment_of_(peer).control();
      const bool differs = how_.active.contains(peer) ? excludes(theirs, peer, ep_rank_)
                                                      : intrudes(theirs, ep_rank_);
      if (!differs) continue;
      return record_missed(how_, control_, missed_for(Missed::kMasksDiffer, peer, theirs.epoch));
    }
    return Outcome::kDone;
  }

  // When this rank has read its peers' rows. One that has begun a round without it has not waited
  // for that, and may have written others there.
  Outcome confirm_rows() const {
    // Between reading the rows and the masks, which are written before rows of another round.
    std::atomic_thread_fence(std::memory_order_acquire);
    for (int32_t peer = 0; peer < how_.ep_size; ++peer) {
      if (!how_.active.contains(peer)) continue;
      ControlBlock& theirs = segment_of_(peer).control();
      if (!excludes(theirs, peer, ep_rank_)) continue;
      return record_missed(how_, control_, missed_for(Missed::kWentOn, peer, theirs.epoch));
    }
    return Outcome::kDone;
  }

  // Publishes, with the header, all that this rank has written into the segments of its peers.
  // rows_to: [ep_size], rows for each rank; the other fields that matter are those of same_round.
  void publish(const RoundHeader& round, const int32_t* rows_to) const {
    for_each_peer([&](int32_t peer) {
      const auto segment = segment_of_(peer);
      RoundHeader& header = segment.round_header(ep_rank_);
      header.num_rows = rows_to[peer];
      header.tokens_per_rank = round.tokens_per_rank;
      header.has_weights = round.has_weights;
      header.has_stats = round.has_stats;
      header.num_payloads = round.num_payloads;
      header.top_k = round.top_k;
      header.num_experts = round.num_experts;
      header.signature = signature_of(how_.active);
      std::copy_n(round.row_bytes, kMaxPayloads, header.row_bytes);
      signal(&header.dispatched, control_.epoch, &segment.control().sleepers);
    });
  }

  // Waits for the headers of all peers. out_headers: [ep_size], filled where the ranks disagree;
  // then the round is closed on all of them.
  Outcome meet_in_dispatch(RoundHeader* out_headers) const {
    const Deadline deadline = deadline_in(how_.timeout_sec);
    const auto segment = own();
    const auto flag_of = [&](int32_t peer) { return &segment.round_header(peer).dispatched; };
    const Outcome met = wait_for_peers(how_, control_, deadline, flag_of, [&](int32_t peer) {
      return load_acquire(flag_of(peer)) == control_.epoch ? other_mask(peer)
                                                           : obstacle(peer, flag_of(peer));
    });
    if (met != Outcome::kDone) return met;
    for (int32_t peer = 0; peer < how_.ep_size; ++peer) {
      if (!how_.active.contains(peer)) continue;
      const std::optional<Obstacle> differs = other_mask(peer);
      if (differs) return record_missed(how_, control_, {peer, control_.epoch, *differs});
    }
    return headers_agree() ? met : close_round(out_headers, deadline);
  }

  // Publishes, with the flag, all that this rank has written for its peers, and waits for theirs.
  Outcome meet_in_combine(const CombineFlag& rows) const {
    for_each_peer([&](int32_t peer) {
      const auto segment = segment_of_(peer);
      CombineFlag& flag = segment.combine_flag(ep_rank_);
      flag.row_type = rows.row_type;
      flag.low_precision = rows.low_precision;
      flag.hidden_size = rows.hidden_size;
      signal(&flag.ready, control_.epoch, &segment.control().sleepers);
    });
    const Outcome met = wait_for_flags(deadline_in(how_.timeout_sec));
    if (met != Outcome::kDone) return met;
    if (!(who_abandoned() == RankMask{})) return Outcome::kAbandoned;
    bool agree = true;
    for_each_peer(
        [&](int32_t peer) { agree = agree && same_rows(own().combine_flag(peer), rows); });
    return agree ? Outcome::kDone : Outcome::kDisagreement;
  }

  // In place of meet_in_combine, by a rank that has no rows for its peers. They get kAbandoned, and
  // so does it: the round is over on all of them.
  Outcome abandon() const {
    control_.phase = Phase::kIdle;
    CombineFlag none{};
    none.row_type = kAbandoned;
    return meet_in_combine(none);
  }

  // Of a round in which this rank has met the others in combine.
  RankMask who_abandoned() const {
    RankMask ranks;
    for_each_peer([&](int32_t peer) {
      if (own().combine_flag(peer).row_type == kAbandoned) ranks.insert(peer);
    });
    return ranks;
  }

 private:
  auto own() const { return segment_of_(ep_rank_); }

  // This rank among them.
  template <typename Visit>
  void for_each_peer(Visit visit) const {
    for (int32_t peer = 0; peer < how_.ep_size; ++peer) {
      if (how_.active.contains(peer)) visit(peer);
    }
  }

  bool headers_agree() const {
    const auto segment = own();
    bool agree = true;
    for_each_peer([&](int32_t peer) {
      agree = agree && same_round(segment.round_header(peer), segment.round_header(ep_rank_));
    });
    return agree;
  }

  // Of a peer whose header of this round is there. Ranks whose masks differ cannot meet to close
  // the round: each ends it for itself.
  std::optional<Obstacle> other_mask(int32_t peer) const {
    if (own().round_header(peer).signature == signature_of(how_.active)) return std::nullopt;
    return Obstacle{Missed::kMasksDiffer, peer, Missed::kMasksDiffer};
  }

  // Of a peer whose flag is not there.
  std::optional<Obstacle> obstacle(int32_t peer, const uint32_t* flag) const {
    const auto found = obstacle_of(segment_of_(peer).control(), peer, ep_rank_);
    return epoch_reached(load_acquire(flag), control_.epoch) ? std::nullopt : found;
  }

  Outcome wait_for_flags(Deadline deadline) const {
    const auto segment = own();
    const auto flag_of = [&](int32_t peer) { return &segment.combine_flag(peer).ready; };
    return wait_for_peers(how_, control_, deadline, flag_of,
                          [&](int32_t peer) { return obstacle(peer, flag_of(peer)); });
  }

  // All ranks see the same headers, so all come here together. They meet once more, so that none
  // starts the next round, and writes new headers, while another still reads those of this one.
  Outcome close_round(RoundHeader* out_headers, Deadline deadline) const {
    control_.phase = Phase::kIdle;
    for_each_peer([&](int32_t peer) { out_headers[peer] = own().round_header(peer); });
    for_each_peer([&](int32_t peer) {
      const auto segment = segment_of_(peer);
      signal(&segment.combine_flag(ep_rank_).ready, control_.epoch, &segment.control().sleepers);
    });
    const Outcome met = wait_for_flags(deadline);
    return met == Outcome::kDone ? Outcome::kDisagreement : met;
  }

  PeerWait how_;
  int32_t ep_rank_;
  SegmentOf segment_of_;
  ControlBlock& control_;
};

}  // namespace moe_ep
