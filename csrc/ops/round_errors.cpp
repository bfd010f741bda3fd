#include "ops/round_errors.h"

#include <sstream>

#include "core/epoch.h"
#include "one_sided/shared_batch.h"
#include "ops/errors.h"
#include "ops/workspace_args.h"
#include "transport/outcome.h"

namespace moe_ep::ops {

void raise_invalid_ids(const InvalidIdRecord& record, int32_t ep_rank) {
  fail("MoEEpInputError", "rank ", ep_rank, " passed ", record.count, " expert id(s) outside [0, ",
       record.num_experts, "), the first at token ", record.token, ", slot ", record.slot, ": ",
       record.expert_id,
       ". These slots were skipped. Use a negative id or invalid_expert_id for padding.");
}

namespace {

// What can be done; the end of every such message.
constexpr const char* kRemedy =
    " Call reinitialize on the ranks that go on, and mask the others off where the backend takes a "
    "mask; or re-create the communication, without it if it is dead.";

const char* words_for(Missed why) {
  switch (why) {
    case Missed::kProcessEnded:
      return "whose process has ended";
    case Missed::kDestroyed:
      return "whose communication was destroyed";
    case Missed::kInterrupted:
      return "where a signal handler ended its wait";
    case Missed::kWentOn:
      return "which masked it off";
    default:
      return "which it waited for in vain";
  }
}

// What each rank said of a round.
std::string table_of(const RoundHeader* headers, int32_t ep_size) {
  std::ostringstream table;
  for (int32_t rank = 0; rank < ep_size; ++rank) {
    const RoundHeader& header = headers[rank];
    if (header.num_payloads == 0) continue;
    table << "\n  rank " << rank << ": ";
    if (header.num_payloads == one_sided::kSharedBatch) {
      table << "a batch of all ranks, " << header.row_bytes[one_sided::kBatchTokens]
            << " tokens, hash of topk_ids " << std::hex
            << static_cast<uint64_t>(header.row_bytes[one_sided::kBatchRouting]) << std::dec;
    } else {
      table << "tokens_per_rank=" << header.tokens_per_rank << ", topk_weights "
            << (header.has_weights ? "given" : "None") << ", eplb_local_stats "
            << (header.has_stats ? "given" : "None") << ", payload row bytes";
      for (int32_t i = 0; i < header.num_payloads; ++i) table << ' ' << header.row_bytes[i];
    }
    table << ", num_experts=" << header.num_experts << ", top_k=" << header.top_k;
  }
  return table.str();
}

}  // namespace

void raise_timeout(const TimeoutRecord& record, int32_t ep_rank) {
  const bool in_step = record.epoch_seen == record.epoch_expected;
  if (!in_step && epoch_reached(record.epoch_seen, record.epoch_expected)) {
    fail("MoEEpTimeoutError", "rank ", ep_rank, " met rank ", record.peer, " in ",
         phase_name(record.phase), " of another round (epoch ", record.epoch_expected,
         " expected, ", record.epoch_seen,
         " seen): a call failed, or had another active_rank_mask, on one of them only. Call "
         "reinitialize, or re-create the communication, on all ranks.");
  }
  std::ostringstream found;
  if (record.why == Missed::kDeadline) {
    found << "waited " << record.timeout_sec << " s in " << phase_name(record.phase) << " for rank "
          << record.peer;
  } else {
    found << "stopped waiting in " << phase_name(record.phase) << " for rank " << record.peer;
  }
  found << " (epoch " << record.epoch_expected << " expected, " << record.epoch_seen
        << (in_step ? " seen: it stopped among its rows)" : " seen)");
  switch (record.why) {
    case Missed::kProcessEnded:
      found << ", whose process has ended.";
      break;
    case Missed::kDestroyed:
      found << ", whose communication was destroyed.";
      break;
    case Missed::kPeerGaveUp:
      found << ", which has given up itself";
      if (record.first_missed == record.peer) {  // a kernel cannot see more
        found << ": its own error says why.";
      } else {
        found << " because of rank " << record.first_missed << ", " << words_for(record.first_why)
              << ".";
      }
      break;
    default:
      found << ". Rank " << record.peer << " may be dead, slow, or in another number of rounds.";
  }
  fail("MoEEpTimeoutError", "rank ", ep_rank, " ", found.str(), kRemedy);
}

void raise_timed_out_earlier(const TimeoutRecord& record) {
  fail("MoEEpStateError", "a wait on rank ", record.peer,
       record.why == Missed::kDeadline ? " timed out" : " was given up",
       " earlier, so the ranks are out of step: call reinitialize, for a bare workspace "
       "initialize, on all ranks that go on, or create it again, without that rank if it is dead");
}

void raise_interrupt() {
  fail("Interrupted",
       "a signal handler ended the wait; the round is lost, call reinitialize, or re-create the "
       "communication, on all ranks");
}

void raise_other_masks(uint32_t epoch, int64_t ep_rank, const std::string& masks,
                       const char* before) {
  fail("MoEEpMaskDisagreementError", "the ranks have different active_rank_mask in round ", epoch,
       ", found by rank ", ep_rank,
       "; no data was delivered. Of those that it counts on, or that count on it:", masks,
       "\nTake the mask from one place, and call reinitialize on the ranks that go on.", before);
}

void raise_left_behind(const TimeoutRecord& record, int64_t ep_rank, const char* sums) {
  fail("MoEEpMaskDisagreementError", "rank ", record.peer, " masked rank ", ep_rank,
       " off while it was in combine of round ", record.epoch_expected,
       ", and may have overwritten the rows for it: ", sums,
       ". Mask a rank that lives off when it has returned from its combine (on CUDA, from check() "
       "after that); to bring it back, call reinitialize on all.");
}

void raise_dispatch_disagreement(const RoundHeader* headers, int32_t ep_size) {
  fail("MoEEpDisagreementError",
       "the ranks called dispatch with different arguments; no data was delivered. All must call "
       "the same layer, and "
       "runtime_max_tokens_per_rank, the row widths and whether topk_weights and eplb_local_stats "
       "are given must be the same on all ranks:",
       table_of(headers, ep_size));
}

void raise_batch_disagreement(const RoundHeader* headers, int32_t ep_size) {
  fail("MoEEpDisagreementError",
       "the ranks were told to hold the same batch (tp_size), and hold different ones; nothing was "
       "computed. The number of tokens, and the experts of each, must be the same on all of them:",
       table_of(headers, ep_size));
}

void raise_combine_disagreement(const std::string& expert_outputs) {
  fail("MoEEpDisagreementError",
       "the ranks called combine with expert outputs of different width, dtype or precision",
       expert_outputs, ". No sums were formed, the round is over");
}

void raise_abandoned(const RankMask& ranks, int32_t ep_size) {
  fail("MoEEpAbandonedError", abandoned_message(ranks_in(ranks, ep_size)));
}

}  // namespace moe_ep::ops
