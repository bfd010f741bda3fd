// The one-sided transport with ranks as threads (thread_rounds.h). Built with -fsanitize=thread it
// also shows that signal and wait order all that they must.
#include <cstdint>
#include <functional>
#include <limits>
#include <thread>
#include <vector>

#include "core/geometry_check.h"
#include "core/workspace_layout.h"
#include "one_sided/cpu.h"
#include "one_sided/segment.h"
#include "thread_rounds.h"

using namespace moe_ep;

namespace {

constexpr int64_t kReceivedStride = static_cast<int64_t>(row_pitch(kRowBytes)) / 4;
constexpr int32_t kTimeoutSec = 60;

class Rank : Player {
 public:
  Rank(uint8_t* base, const Geometry& geometry, int32_t rank, uint32_t seed)
      : Player(rank, geometry.ep_size, seed),
        layout_(WorkspaceLayout::of(geometry)),
        workspace_{base, static_cast<int64_t>(layout_.segment_bytes), rank, geometry},
        own_(workspace_, layout_, rank) {}

  // As if `epoch` rounds had gone before.
  void initialize(uint32_t epoch) {
    one_sided::initialize(workspace_);
    own_.control().epoch = epoch;
    for (int32_t peer = 0; peer < ranks_; ++peer) {
      own_.round_header(peer).dispatched = epoch;
      own_.combine_flag(peer).ready = epoch;
    }
  }

  bool run(int32_t number, const Round& round) {
    maybe_sleep();
    if (number % 8 == 7 && ranks_ > 1) return disagree(number, round);
    if (dispatch(number, round, number % 3 != 0) != Outcome::kDone) {
      return complain("dispatch", number, 0, 0);
    }
    if (!check_dispatch(number, round)) return false;
    maybe_sleep();
    return combine(number, round);
  }

 private:
  Outcome dispatch(int32_t number, const Round& round, bool has_weights) {
    const int32_t n = round.tokens_of(me_);
    const std::vector<int32_t>& own_ids = round.ids[static_cast<size_t>(me_)];
    const std::vector<int64_t> wide_ids(own_ids.begin(), own_ids.end());
    const std::vector<float> rows = rows_of(number, round);
    std::vector<float> weights;
    for (int32_t t = 0; t < n; ++t) {
      for (int32_t k = 0; k < kTopK; ++k) weights.push_back(value_of(number, me_, t, k));
    }
    const auto ranks = static_cast<size_t>(ranks_);
    received_ids_.assign(ranks * kCapacity * kTopK, 0);
    received_weights_.assign(has_weights ? received_ids_.size() : 0, 0.0f);
    headers_.assign(ranks, {});
    recv_counts_.assign(ranks, 0);

    one_sided::DispatchParams d{};
    d.workspace = workspace_;
    d.active = RankMask::all(ranks_);
    d.num_tokens = n;
    d.tokens_per_rank = kCapacity;
    d.ids_are_int64 = (number + me_) % 2 == 0;
    d.topk_ids = d.ids_are_int64 ? static_cast<const void*>(wide_ids.data()) : own_ids.data();
    d.has_weights = has_weights;
    d.topk_weights = weights.data();
    d.payloads[0] = {reinterpret_cast<const uint8_t*>(rows.data()), kRowBytes, kRowBytes};
    d.num_payloads = 1;
    d.invalid_expert_id = -1;
    d.timeout_sec = kTimeoutSec;
    d.out_topk_ids = received_ids_.data();
    d.out_recv_counts = recv_counts_.data();
    d.out_topk_weights = has_weights ? received_weights_.data() : nullptr;
    d.out_headers = headers_.data();
    return one_sided::dispatch(d, on_two_threads);
  }

  // All must learn that rank 0 alone has weights.
  bool disagree(int32_t number, const Round& round) {
    if (dispatch(number, round, me_ == 0) != Outcome::kDisagreement) {
      return complain("agreement", number, 0, 0);
    }
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      if (headers_[static_cast<size_t>(rank)].has_weights != (rank == 0)) {
        return complain("header", number, rank, 0);
      }
    }
    return true;
  }

  // Makes the experts' rows of what came.
  bool check_dispatch(int32_t number, const Round& round) {
    const auto* received = reinterpret_cast<const float*>(own_.bytes(layout_.payloads.offset));
    expert_output_.assign(static_cast<size_t>(ranks_) * kCapacity * kHidden,
                          std::numeric_limits<float>::quiet_NaN());
    for (int32_t source = 0; source < ranks_; ++source) {
      int32_t row = source * kCapacity;
      for (int32_t t = 0; t < round.tokens_of(source); ++t) {
        if (!round.goes(partition_, source, t, me_)) continue;
        for (int32_t c = 0; c < kHidden; ++c) {
          const float value = received[row * kReceivedStride + c];
          if (value != value_of(number, source, t, c)) return complain("row", number, row, c);
          expert_output_[static_cast<size_t>(row * kHidden + c)] =
              value * static_cast<float>(me_ + 1);
        }
        for (int32_t k = 0; k < kTopK && !received_weights_.empty(); ++k) {
          const float weight = received_weights_[static_cast<size_t>(row * kTopK + k)];
          if (weight != value_of(number, source, t, k)) return complain("weight", number, row, k);
        }
        ++row;
      }
      if (recv_counts_[static_cast<size_t>(source)] != row - source * kCapacity) {
        return complain("count", number, source, 0);
      }
      for (; row < (source + 1) * kCapacity; ++row) {
        for (int32_t k = 0; k < kTopK; ++k) {
          const int32_t id = received_ids_[static_cast<size_t>(row * kTopK + k)];
          if (id != -1) return complain("id", number, row, k);
        }
      }
    }
    return true;
  }

  bool combine(int32_t number, const Round& round) {
    const int32_t n = round.tokens_of(me_);
    std::vector<float> output(static_cast<size_t>(n) * kHidden);
    one_sided::CombineParams c{};
    c.workspace = workspace_;
    c.active = RankMask::all(ranks_);
    c.num_tokens = n;
    c.tokens_per_rank = kCapacity;
    c.hidden_size = kHidden;
    c.row_type = RowType::kFloat32;
    c.expert_output = reinterpret_cast<const uint8_t*>(expert_output_.data());
    c.expert_output_stride = kRowBytes;
    c.timeout_sec = kTimeoutSec;
    c.output = reinterpret_cast<uint8_t*>(output.data());
    if (one_sided::combine(c, on_two_threads) != Outcome::kDone) {
      return complain("combine", number, 0, 0);
    }
    return check_sums(number, round, output);
  }

  static void on_two_threads(int64_t begin, int64_t end, int64_t,
                             const std::function<void(int64_t, int64_t)>& body) {
    const int64_t middle = (begin + end) / 2;
    std::thread other([&] { body(begin, middle); });
    body(middle, end);
    other.join();
  }

  WorkspaceLayout layout_;
  one_sided::WorkspaceView workspace_;
  one_sided::Segment own_;
  std::vector<RoundHeader> headers_;
  std::vector<int32_t> recv_counts_;
  std::vector<int32_t> received_ids_;
  std::vector<float> received_weights_;  // empty in a round without
  std::vector<float> expert_output_;
};

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments(argc, argv);
  const Geometry geometry = valid_geometry(arguments.ranks, kNumExperts, kTopK, kCapacity,
                                           kRowBytes, kRowBytes, 0, 0, 0, 0, 0, 1);
  const uint64_t segment_bytes = WorkspaceLayout::of(geometry).segment_bytes;
  return arguments.verdict(play<Rank>(arguments, geometry, segment_bytes));
}
