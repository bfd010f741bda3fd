// Rounds that ranks play as threads over one plain buffer: random sizes, ids and delays, every
// element of every rank compared with a direct evaluation.
//
// Arguments of a program that plays them: number of ranks, rounds, where the numbers that wrap
// begin, seed.
#pragma once

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
#include "core/workspace_layout.h"

namespace moe_ep {

constexpr int32_t kNumExperts = 11;
constexpr int32_t kTopK = 3;
constexpr int32_t kCapacity = 6;
constexpr int32_t kHidden = 70;  // a whole block and a rest
constexpr int64_t kRowBytes = kHidden * 4;

struct Arguments {
  int32_t ranks, rounds;
  uint32_t first, seed;

  Arguments(int argc, char** argv)
      : ranks(argc > 1 ? std::atoi(argv[1]) : 4),
        rounds(argc > 2 ? std::atoi(argv[2]) : 300),
        first(static_cast<uint32_t>(argc > 3 ? std::strtoul(argv[3], nullptr, 0) : 0)),
        seed(static_cast<uint32_t>(argc > 4 ? std::atoi(argv[4]) : 1)) {}

  // What the program says, and its exit status.
  int verdict(bool good) const {
    if (good) std::printf("%d rounds of %d ranks, every element right\n", rounds, ranks);
    return good ? 0 : 1;
  }
};

struct Round {
  std::vector<int32_t> num_tokens;        // [ranks]
  std::vector<std::vector<int32_t>> ids;  // [ranks][num_tokens * kTopK]

  static Round draw(std::mt19937& random, int32_t ranks) {
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

  int32_t tokens_of(int32_t source) const { return num_tokens[static_cast<size_t>(source)]; }
  int32_t id(int32_t source, int32_t token, int32_t k) const {
    return ids[static_cast<size_t>(source)][static_cast<size_t>(token * kTopK + k)];
  }
  bool goes(const ExpertPartition& partition, int32_t source, int32_t token, int32_t owner) const {
    for (int32_t k = 0; k < kTopK; ++k) {
      const int32_t picked = id(source, token, k);
      if (picked >= 0 && partition.owner_of(picked) == owner) return true;
    }
    return false;
  }
};

inline float value_of(int32_t round, int32_t rank, int32_t token, int32_t column) {
  return static_cast<float>(round % 97 * 64 + rank * 8 + token) + static_cast<float>(column) / 128;
}

// What a rank of each transport has alike. The experts of rank r multiply by r + 1.
class Player {
 protected:
  Player(int32_t rank, int32_t ranks, uint32_t seed)
      : me_(rank),
        ranks_(ranks),
        partition_(kNumExperts, ranks),
        random_(seed + static_cast<uint32_t>(rank)) {}

  // What it sends: [its tokens, kHidden].
  std::vector<float> rows_of(int32_t number, const Round& round) const {
    std::vector<float> rows;
    for (int32_t t = 0; t < round.tokens_of(me_); ++t) {
      for (int32_t c = 0; c < kHidden; ++c) rows.push_back(value_of(number, me_, t, c));
    }
    return rows;
  }

  bool check_sums(int32_t number, const Round& round, const std::vector<float>& sums) const {
    for (int32_t t = 0; t < round.tokens_of(me_); ++t) {
      for (int32_t c = 0; c < kHidden; ++c) {
        float sum = 0.0f;
        for (int32_t owner = 0; owner < ranks_; ++owner) {
          if (!round.goes(partition_, me_, t, owner)) continue;
          sum += value_of(number, me_, t, c) * static_cast<float>(owner + 1);
        }
        if (sums[static_cast<size_t>(t * kHidden + c)] != sum) {
          return complain("sum", number, t, c);
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
    std::printf("rank %d, round %d: wrong %s at row %d, column %d\n", me_, round, what, row,
                column);
    return false;
  }

  int32_t me_;
  int32_t ranks_;
  ExpertPartition partition_;

 private:
  std::mt19937 random_;
};

// Plays the rounds with a thread for each rank; returns whether all was right. A Rank is made of
// (memory of all ranks, geometry, its number, seed), and has initialize(first) and
// run(number, round), which returns false if an element is not what it must be, and says where.
template <typename Rank, typename Geometry>
bool play(const Arguments& arguments, const Geometry& geometry, uint64_t segment_bytes) {
  const int32_t ranks = arguments.ranks;
  auto* base = static_cast<uint8_t*>(
      std::aligned_alloc(kRegionAlignment, segment_bytes * static_cast<uint64_t>(ranks)));
  std::mt19937 random(arguments.seed);
  std::vector<Round> plan;
  for (int32_t i = 0; i < arguments.rounds; ++i) plan.push_back(Round::draw(random, ranks));

  std::atomic<bool> good{true};
  std::barrier initialised(ranks);
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(base, geometry, r, arguments.seed);
      rank.initialize(arguments.first);
      initialised.arrive_and_wait();
      for (int32_t i = 0; i < arguments.rounds && good; ++i) {
        if (!rank.run(i, plan[static_cast<size_t>(i)])) good = false;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::free(base);
  return good;
}

}  // namespace moe_ep
