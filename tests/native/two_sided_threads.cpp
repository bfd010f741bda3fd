// Many ranks as threads over one plain buffer: rounds with random sizes, ids, delays and FIFOs of
// two small slots, every element of every rank compared with a direct evaluation. Built with
// -fsanitize=thread it also shows that heads, tails and bells order all that they must.
//
// Arguments: number of ranks, rounds, where epochs and slot numbers begin, seed.
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "core/expert_partition.h"
#include "two_sided/cpu.h"
#include "two_sided/segment.h"

using namespace moe_ep;

namespace {

constexpr int32_t kNumExperts = 11;
constexpr int32_t kTopK = 3;
constexpr int32_t kCapacity = 6;
constexpr int32_t kHidden = 70;  // a whole block and a rest
constexpr int64_t kRowBytes = kHidden * 4;
constexpr int64_t kIdBytes = kTopK * 4;
constexpr int32_t kTimeoutSec = 15;

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
    const int32_t id =
        round.ids[static_cast<size_t>(source)][static_cast<size_t>(token * kTopK + k)];
    if (id >= 0 && partition.owner_of(id) == owner) return true;
  }
  return false;
}

class Rank {
 public:
  Rank(uint8_t* base, const two_sided::Geometry& geometry, int32_t rank, uint32_t seed)
      : workspace_{base, static_cast<int64_t>(two_sided::FifoLayout::of(geometry).segment_bytes),
                   rank, geometry},
        partition_(kNumExperts, geometry.ep_size),
        random_(seed + static_cast<uint32_t>(rank)) {}

  // As if `first` rounds had gone before, and as many slots through each FIFO.
  void initialize(uint32_t first) {
    two_sided::initialize(workspace_);
    const two_sided::FifoLayout layout = two_sided::FifoLayout::of(workspace_.geometry);
    const two_sided::Segment own(workspace_, layout, workspace_.ep_rank);
    own.control().epoch = first;
    *own.bell() = first;
    for (int32_t peer = 0; peer < workspace_.geometry.ep_size; ++peer) {
      own.round_header(peer).dispatched = first;
      own.combine_flag(peer).ready = first;
      *own.head(peer) = first;
      *own.tail(peer) = first;
    }
  }

  // Returns false and says where, if an element is not what it must be.
  bool run(int32_t number, const Round& round) {
    maybe_sleep();
    if (!dispatch(number, round) || !check_dispatch(number, round)) return false;
    maybe_sleep();
    return combine(number, round);
  }

 private:
  bool dispatch(int32_t number, const Round& round) {
    const two_sided::Geometry& g = workspace_.geometry;
    const int32_t me = workspace_.ep_rank;
    const int32_t n = round.num_tokens[static_cast<size_t>(me)];
    const std::vector<int32_t>& own_ids = round.ids[static_cast<size_t>(me)];
    const std::vector<int64_t> wide_ids(own_ids.begin(), own_ids.end());
    std::vector<float> rows(static_cast<size_t>(n) * kHidden);
    for (int32_t t = 0; t < n; ++t) {
      for (int32_t c = 0; c < kHidden; ++c) {
        rows[static_cast<size_t>(t * kHidden + c)] = value_of(number, me, t, c);
      }
    }
    const auto ranks = static_cast<size_t>(g.ep_size);
    const size_t max_rows = ranks * kCapacity;
    std::vector<int32_t> ids(own_ids.size()), send_counts(ranks);
    std::vector<RoundHeader> headers(ranks);
    send_tokens_.assign(static_cast<size_t>(n * g.max_destinations()), 0);
    recv_counts_.assign(ranks, 0);

    two_sided::PrepareParams p{};
    p.workspace = workspace_;
    p.num_tokens = n;
    p.tokens_per_rank = kCapacity;
    p.ids_are_int64 = (number + me) % 2 == 0;
    p.topk_ids = p.ids_are_int64 ? static_cast<const void*>(wide_ids.data()) : own_ids.data();
    p.invalid_expert_id = -1;
    p.fields = {2, {kRowBytes, kIdBytes}};
    p.timeout_sec = kTimeoutSec;
    p.out_topk_ids = ids.data();
    p.out_send_tokens = send_tokens_.data();
    p.out_send_counts = send_counts.data();
    p.out_recv_counts = recv_counts_.data();
    p.out_headers = headers.data();
    if (number % 8 == 7 && g.ep_size > 1) {
      p.has_weights = me == 0;
      if (two_sided::prepare(p) != Outcome::kDisagreement) {
        return complain("agreement", number, 0, 0);
      }
      p.has_weights = false;
    }
    if (two_sided::prepare(p) != Outcome::kDone) return complain("prepare", number, 0, 0);

    received_.assign(max_rows * kHidden, -1.0f);
    received_ids_.assign(max_rows * kTopK, -1);
    two_sided::AlltoallvParams a{};
    a.workspace = workspace_;
    a.tokens_per_rank = kCapacity;
    a.send_tokens = send_tokens_.data();
    a.num_fields = 2;
    a.rows[0] = {reinterpret_cast<const uint8_t*>(rows.data()), kRowBytes, kRowBytes};
    a.rows[1] = {reinterpret_cast<const uint8_t*>(ids.data()), kIdBytes, kIdBytes};
    a.received[0] = reinterpret_cast<uint8_t*>(received_.data());
    a.received[1] = reinterpret_cast<uint8_t*>(received_ids_.data());
    a.timeout_sec = kTimeoutSec;
    return two_sided::alltoallv(a) == Outcome::kDone || complain("alltoallv", number, 0, 0);
  }

  bool check_dispatch(int32_t number, const Round& round) const {
    const int32_t me = workspace_.ep_rank;
    for (int32_t source = 0; source < workspace_.geometry.ep_size; ++source) {
      int32_t row = source * kCapacity;
      for (int32_t t = 0; t < round.num_tokens[static_cast<size_t>(source)]; ++t) {
        if (!goes_to(round, partition_, source, t, me)) continue;
        for (int32_t c = 0; c < kHidden; ++c) {
          const float value = received_[static_cast<size_t>(row * kHidden + c)];
          if (value != value_of(number, source, t, c)) return complain("row", number, row, c);
        }
        for (int32_t k = 0; k < kTopK; ++k) {
          const int32_t id = received_ids_[static_cast<size_t>(row * kTopK + k)];
          const int32_t sent =
              round.ids[static_cast<size_t>(source)][static_cast<size_t>(t * kTopK + k)];
          if (id != sent) return complain("id", number, row, k);
        }
        ++row;
      }
      if (recv_counts_[static_cast<size_t>(source)] != row - source * kCapacity) {
        return complain("count", number, source, 0);
      }
    }
    return true;
  }

  bool combine(int32_t number, const Round& round) {
    const int32_t me = workspace_.ep_rank;
    const int32_t n = round.num_tokens[static_cast<size_t>(me)];
    for (float& value : received_) value *= static_cast<float>(me + 1);
    std::vector<float> output(static_cast<size_t>(n) * kHidden);
    two_sided::CombineParams c{};
    c.workspace = workspace_;
    c.num_tokens = n;
    c.tokens_per_rank = kCapacity;
    c.hidden_size = kHidden;
    c.row_type = RowType::kFloat32;
    c.send_tokens = send_tokens_.data();
    c.expert_output = {reinterpret_cast<const uint8_t*>(received_.data()), kRowBytes, kRowBytes};
    c.timeout_sec = kTimeoutSec;
    c.output = reinterpret_cast<uint8_t*>(output.data());
    if (two_sided::combine(c) != Outcome::kDone) return complain("combine", number, 0, 0);
    for (int32_t t = 0; t < n; ++t) {
      for (int32_t column = 0; column < kHidden; ++column) {
        float sum = 0.0f;
        for (int32_t owner = 0; owner < workspace_.geometry.ep_size; ++owner) {
          if (goes_to(round, partition_, me, t, owner)) {
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

  void maybe_sleep() {
    if (random_() % 16 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 500));
    }
  }

  bool complain(const char* what, int32_t round, int32_t row, int32_t column) const {
    std::printf("rank %d, round %d: wrong %s at row %d, column %d\n", workspace_.ep_rank, round,
                what, row, column);
    return false;
  }

  two_sided::WorkspaceView workspace_;
  ExpertPartition partition_;
  std::mt19937 random_;
  std::vector<int32_t> send_tokens_;
  std::vector<int32_t> recv_counts_;
  std::vector<float> received_;
  std::vector<int32_t> received_ids_;
};

}  // namespace

int main(int argc, char** argv) {
  const int32_t ranks = argc > 1 ? std::atoi(argv[1]) : 4;
  const int32_t rounds = argc > 2 ? std::atoi(argv[2]) : 300;
  const auto first = static_cast<uint32_t>(argc > 3 ? std::strtoul(argv[3], nullptr, 0) : 0);
  const auto seed = static_cast<uint32_t>(argc > 4 ? std::atoi(argv[4]) : 1);
  std::atomic<bool> good{true};
  // A dispatch record in one slot, and in three.
  for (const int64_t slot_bytes : {kRowBytes + kIdBytes, int64_t{100}}) {
    const two_sided::Geometry geometry =
        two_sided::valid_geometry(ranks, kNumExperts, kTopK, kCapacity, 2, slot_bytes, 1, 1);
    const uint64_t bytes =
        two_sided::FifoLayout::of(geometry).segment_bytes * static_cast<uint64_t>(ranks);
    auto* base = static_cast<uint8_t*>(std::aligned_alloc(kRegionAlignment, bytes));

    std::mt19937 random(seed);
    std::vector<Round> plan;
    for (int32_t i = 0; i < rounds; ++i) plan.push_back(draw_round(random, ranks));

    std::barrier initialised(ranks);
    std::vector<std::thread> threads;
    for (int32_t r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        Rank rank(base, geometry, r, seed);
        rank.initialize(first);
        initialised.arrive_and_wait();
        for (int32_t i = 0; i < rounds && good; ++i) {
          if (!rank.run(i, plan[static_cast<size_t>(i)])) good = false;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::free(base);
  }
  if (good) std::printf("%d rounds of %d ranks, every element right\n", rounds, ranks);
  return good ? 0 : 1;
}
