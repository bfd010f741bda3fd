// Many ranks as threads over one plain buffer: rounds with random sizes, ids and delays, every
// element of every rank compared with a direct evaluation. Built with -fsanitize=thread it also
// shows that signal and wait order all that they must.
//
// Arguments: number of ranks, rounds, seed.
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "core/expert_partition.h"
#include "core/geometry_check.h"
#include "core/workspace_layout.h"
#include "one_sided/cpu.h"
#include "one_sided/segment.h"

using namespace moe_ep;

namespace {

constexpr int32_t kNumExperts = 11;
constexpr int32_t kTopK = 3;
constexpr int32_t kCapacity = 6;
constexpr int32_t kHidden = 70;  // a whole block and a rest
constexpr int64_t kReceivedStride = static_cast<int64_t>(row_pitch(kHidden * 4)) / 4;

struct Round {
  std::vector<int32_t> num_tokens;        // [ranks]
  std::vector<std::vector<int32_t>> ids;  // [ranks][num_tokens * kTopK]
};

Round draw_round(std::mt19937& random, int32_t ranks) {
  Round round;
  for (int32_t r = 0; r < ranks; ++r) {
    const auto n = static_cast<int32_t>(random() % (kCapacity + 1));
    round.num_tokens.push_back(n);
    std::vector<int32_t> ids(static_cast<size_t>(n) * kTopK);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % (kNumExperts + 1)) - 1;
    round.ids.push_back(ids);
  }
  return round;
}

float value_of(int32_t round, int32_t rank, int32_t token, int32_t column) {
  return static_cast<float>(round % 97 * 64 + rank * 8 + token) + static_cast<float>(column) / 128;
}

bool goes_to(const Round& round, const ExpertPartition& partition, int32_t source, int32_t token,
             int32_t owner) {
  for (int32_t k = 0; k < kTopK; ++k) {
    const int32_t id = round.ids[source][static_cast<size_t>(token * kTopK + k)];
    if (id >= 0 && partition.owner_of(id) == owner) return true;
  }
  return false;
}

class Rank {
 public:
  Rank(uint8_t* base, const Geometry& geometry, int32_t rank, uint32_t seed)
      : workspace_{base, static_cast<int64_t>(WorkspaceLayout::of(geometry).segment_bytes), rank,
                   geometry},
        random_(seed + static_cast<uint32_t>(rank)) {}

  // As if `epoch` rounds had gone before.
  void initialize(uint32_t epoch) {
    one_sided::initialize(workspace_);
    const WorkspaceLayout layout = WorkspaceLayout::of(workspace_.geometry);
    const one_sided::Segment own(workspace_, layout, workspace_.ep_rank);
    own.control().epoch = epoch;
    for (int32_t peer = 0; peer < workspace_.geometry.ep_size; ++peer) {
      own.round_header(peer).dispatched = epoch;
      own.combine_flag(peer).ready = epoch;
    }
  }

  // Returns false and says where, if an element is not what it must be.
  bool run(int32_t number, const Round& round) {
    maybe_sleep();
    const Geometry& g = workspace_.geometry;
    const int32_t me = workspace_.ep_rank;
    const int32_t n = round.num_tokens[static_cast<size_t>(me)];
    std::vector<float> rows(static_cast<size_t>(n) * kHidden);
    for (int32_t t = 0; t < n; ++t) {
      for (int32_t c = 0; c < kHidden; ++c) {
        rows[static_cast<size_t>(t * kHidden + c)] = value_of(number, me, t, c);
      }
    }
    const std::vector<int32_t>& own_ids = round.ids[static_cast<size_t>(me)];
    const std::vector<int64_t> wide_ids(own_ids.begin(), own_ids.end());
    std::vector<float> weights(own_ids.size());
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i] =
          value_of(number, me, static_cast<int32_t>(i) / kTopK, static_cast<int32_t>(i) % kTopK);
    }
    std::vector<int32_t> ids(static_cast<size_t>(g.max_rows()) * kTopK);
    std::vector<float> received_weights(ids.size());
    std::vector<RoundHeader> headers(static_cast<size_t>(g.ep_size));
    std::vector<int32_t> counts(static_cast<size_t>(g.ep_size));

    one_sided::DispatchParams d{};
    d.workspace = workspace_;
    d.active = RankMask::all(g.ep_size);
    d.num_tokens = n;
    d.tokens_per_rank = kCapacity;
    d.ids_are_int64 = (number + me) % 2 == 0;
    d.topk_ids = d.ids_are_int64 ? static_cast<const void*>(wide_ids.data()) : own_ids.data();
    d.has_weights = number % 3 != 0;
    d.topk_weights = weights.data();
    d.payloads[0] = {reinterpret_cast<const uint8_t*>(rows.data()), kHidden * 4, kHidden * 4};
    d.num_payloads = 1;
    d.invalid_expert_id = -1;
    d.timeout_sec = 60;
    d.out_topk_ids = ids.data();
    d.out_recv_counts = counts.data();
    d.out_topk_weights = d.has_weights ? received_weights.data() : nullptr;
    d.out_headers = headers.data();
    if (number % 8 == 7 && g.ep_size > 1) {
      d.has_weights = me == 0;
      if (one_sided::dispatch(d, on_two_threads) != Outcome::kDisagreement) {
        return complain("agreement", number, 0, 0);
      }
      for (int32_t rank = 0; rank < g.ep_size; ++rank) {
        if (headers[static_cast<size_t>(rank)].has_weights != (rank == 0)) {
          return complain("header", number, rank, 0);
        }
      }
      return true;
    }
    if (one_sided::dispatch(d, on_two_threads) != Outcome::kDone) {
      return complain("dispatch", number, 0, 0);
    }

    const WorkspaceLayout layout = WorkspaceLayout::of(g);
    const one_sided::Segment own(workspace_, layout, me);
    const ExpertPartition partition(kNumExperts, g.ep_size);
    const auto* received = reinterpret_cast<const float*>(own.bytes(layout.payloads.offset));
    std::vector<float> expert_output(static_cast<size_t>(g.max_rows()) * kHidden,
                                     std::numeric_limits<float>::quiet_NaN());
    for (int32_t source = 0; source < g.ep_size; ++source) {
      int32_t row = source * kCapacity;
      for (int32_t t = 0; t < round.num_tokens[static_cast<size_t>(source)]; ++t) {
        if (!goes_to(round, partition, source, t, me)) continue;
        for (int32_t c = 0; c < kHidden; ++c) {
          const float value = received[row * kReceivedStride + c];
          if (value != value_of(number, source, t, c)) return complain("row", number, row, c);
          expert_output[static_cast<size_t>(row * kHidden + c)] =
              value * static_cast<float>(me + 1);
        }
        for (int32_t k = 0; k < kTopK && d.has_weights; ++k) {
          const float weight = received_weights[static_cast<size_t>(row * kTopK + k)];
          if (weight != value_of(number, source, t, k)) return complain("weight", number, row, k);
        }
        ++row;
      }
      if (counts[static_cast<size_t>(source)] != row - source * kCapacity) {
        return complain("count", number, source, 0);
      }
      for (; row < (source + 1) * kCapacity; ++row) {
        for (int32_t k = 0; k < kTopK; ++k) {
          if (ids[static_cast<size_t>(row * kTopK + k)] != -1)
            return complain("id", number, row, k);
        }
      }
    }
    maybe_sleep();

    std::vector<float> output(static_cast<size_t>(n) * kHidden);
    one_sided::CombineParams c{};
    c.workspace = workspace_;
    c.active = d.active;
    c.num_tokens = n;
    c.tokens_per_rank = kCapacity;
    c.hidden_size = kHidden;
    c.row_type = RowType::kFloat32;
    c.expert_output = reinterpret_cast<const uint8_t*>(expert_output.data());
    c.expert_output_stride = kHidden * 4;
    c.timeout_sec = 60;
    c.output = reinterpret_cast<uint8_t*>(output.data());
    if (one_sided::combine(c, on_two_threads) != Outcome::kDone) {
      return complain("combine", number, 0, 0);
    }
    for (int32_t t = 0; t < n; ++t) {
      for (int32_t column = 0; column < kHidden; ++column) {
        float sum = 0.0f;
        for (int32_t owner = 0; owner < g.ep_size; ++owner) {
          if (goes_to(round, partition, me, t, owner)) {
            sum += value_of(number, me, t, column) * static_cast<float>(owner + 1);
          }
        }
        if (output[static_cast<size_t>(t * kHidden + column)] != sum) {
          return complain("sum", number, t, column);
        }
      }
    }
    return true;
  }

 private:
  static void on_two_threads(int64_t begin, int64_t end, int64_t,
                             const std::function<void(int64_t, int64_t)>& body) {
    const int64_t middle = (begin + end) / 2;
    std::thread other([&] { body(begin, middle); });
    body(middle, end);
    other.join();
  }

  void maybe_sleep() {
    if (random_() % 16 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 500));
  }

  bool complain(const char* what, int32_t round, int32_t row, int32_t column) const {
    std::printf("rank %d, round %d: wrong %s at row %d, column %d\n", workspace_.ep_rank, round,
                what, row, column);
    return false;
  }

  one_sided::WorkspaceView workspace_;
  std::mt19937 random_;
};

}  // namespace

int main(int argc, char** argv) {
  const int32_t ranks = argc > 1 ? std::atoi(argv[1]) : 4;
  const int32_t rounds = argc > 2 ? std::atoi(argv[2]) : 300;
  const auto first_epoch = static_cast<uint32_t>(argc > 3 ? std::strtoul(argv[3], nullptr, 0) : 0);
  const auto seed = static_cast<uint32_t>(argc > 4 ? std::atoi(argv[4]) : 1);
  const Geometry geometry =
      valid_geometry(ranks, kNumExperts, kTopK, kCapacity, kHidden * 4, kHidden * 4, 0, 0, 0, 0, 0);
  const uint64_t bytes = WorkspaceLayout::of(geometry).segment_bytes * static_cast<uint64_t>(ranks);
  auto* base = static_cast<uint8_t*>(std::aligned_alloc(kRegionAlignment, bytes));

  std::mt19937 random(seed);
  std::vector<Round> plan;
  for (int32_t i = 0; i < rounds; ++i) plan.push_back(draw_round(random, ranks));

  std::atomic<bool> good{true};
  std::barrier initialised(ranks);
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(base, geometry, r, seed);
      rank.initialize(first_epoch);
      initialised.arrive_and_wait();
      for (int32_t i = 0; i < rounds && good; ++i) {
        if (!rank.run(i, plan[static_cast<size_t>(i)])) good = false;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::free(base);
  if (good) std::printf("%d rounds of %d ranks, every element right\n", rounds, ranks);
  return good ? 0 : 1;
}
