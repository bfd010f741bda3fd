// The warps of the CUDA kernels (csrc/two_sided/roles) as threads, one lane each: rounds with
// random tokens, channels and delays, FIFOs of one small slot, and fewer CTAs than there are groups
// of channels, down to one. Every byte of every rank is compared with a direct evaluation. Built
// with -fsanitize=thread it also shows that heads and tails order all that they must.
//
// Arguments: number of ranks, rounds, where slot numbers begin, seed.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <thread>
#include <vector>

#include "two_sided/cpu.h"
#include "two_sided/roles/receive_slots.h"
#include "two_sided/roles/send_rows.h"
#include "two_sided/roles/send_tokens.h"
#include "two_sided/roles/sum_tokens.h"
#include "two_sided_warp.h"

using namespace moe_ep;
using namespace moe_ep::two_sided;

namespace {

constexpr int32_t kWords = 8;  // ranks, at most

struct Case {
  int32_t channels;
  int32_t slots;
  int64_t slot_bytes;
  int32_t record_chunks;
  int32_t ctas;
};
// Parts of one chunk in more items than channels, records that share slots, few and many CTAs.
constexpr Case kCases[] = {
    {1, 1, 16, 3, 1}, {3, 1, 64, 5, 1}, {8, 2, 80, 11, 1}, {8, 1, 400, 4, 2}, {24, 2, 48, 7, 3},
};

// Tokens of all ranks, and where they go.
struct Round {
  std::vector<int32_t> num_tokens;                   // [ranks]
  std::vector<std::vector<std::vector<bool>>> goes;  // [source][token][owner]
};

uint8_t byte_of(int32_t round, int32_t source, int32_t token, int64_t byte) {
  return static_cast<uint8_t>(round * 31 + source * 67 + token * 13 + byte * 7);
}
// What the experts of an owner make of a token; exact in every order of a few additions.
float value_of(int32_t round, int32_t source, int32_t token, int32_t owner, int64_t column) {
  return static_cast<float>((round % 50 + source * 9 + token) * (owner + 1)) +
         static_cast<float>(column) / 256;
}

// A rank: a grid of threads for each of alltoallv and combine.
class Rank {
 public:
  Rank(const WorkspaceView& workspace, const Case& the_case, uint32_t first, Moves& moves)
      : moves_(moves),
        workspace_(workspace),
        layout_(FifoLayout::of(workspace.geometry)),
        case_(the_case),
        shape_(CtaShape::of_alltoallv(workspace.geometry.ep_size)),
        plan_(plan_of(CtaShape::joined_in_alltoallv(workspace.geometry.ep_size))) {
    initialize(workspace);
    const Segment own(workspace_, layout_, workspace_.ep_rank);
    for (int32_t peer = 0; peer < workspace_.geometry.ep_size; ++peer) {
      for (int32_t channel = 0; channel < the_case.channels; ++channel) {
        *own.head(peer, channel) = *own.tail(peer, channel) = first;
        *own.sent(peer, channel) = *own.taken(peer, channel) = first;
      }
    }
  }

  // What prepare finds out.
  void prepare(int32_t number, const Round& round) {
    const Segment own(workspace_, layout_, workspace_.ep_rank);
    const int32_t me = workspace_.ep_rank;
    const auto ranks = workspace_.geometry.ep_size;
    num_tokens_ = round.num_tokens[static_cast<size_t>(me)];
    send_tokens_.clear();
    for (int32_t peer = 0; peer < ranks; ++peer) {
      own.list_begins()[peer] = static_cast<int32_t>(send_tokens_.size());
      for (int32_t bound = 0; bound <= case_.channels; ++bound) {
        own.send_bounds(peer)[bound] = rows_before(round, me, peer, bound);
        own.recv_bounds(peer)[bound] = rows_before(round, peer, me, bound);
      }
      for (int32_t t = 0; t < num_tokens_; ++t) {
        if (goes(round, me, t, peer)) send_tokens_.push_back(t);
      }
    }
    const int64_t record_bytes = int64_t{case_.record_chunks} * 16;
    const auto rows = static_cast<size_t>(ranks) * kCapacity;
    const auto columns = static_cast<size_t>(record_bytes / 4);
    tensors_ = {record_bytes,
                me,
                {},
                std::vector<uint8_t>(rows * columns * 4),
                std::vector<float>(rows * columns),
                std::vector<float>(static_cast<size_t>(num_tokens_) * columns, -1.0f)};
    for (int32_t t = 0; t < num_tokens_; ++t) {
      for (int64_t b = 0; b < record_bytes; ++b) {
        tensors_.given.push_back(byte_of(number, me, t, b));
      }
    }
  }

  bool alltoallv(std::mt19937& random) {
    next_group_ = 0;
    shape_ = CtaShape::of_alltoallv(workspace_.geometry.ep_size);
    plan_ = plan_of(CtaShape::joined_in_alltoallv(workspace_.geometry.ep_size));
    return run_grid(random, [&](CopyingWarp& warp, const Channel& channel, int32_t peer_warp) {
      return peer_warp < 0
                 ? TokenSender<CopyingWarp, kWords>(warp, channel).run()
                 : SlotReceiver<CopyingWarp, kWords>(warp, channel, shape_, peer_warp).run();
    });
  }
  bool combine(std::mt19937& random) {
    next_group_ = 0;
    shape_ = CtaShape::of_combine();
    plan_ = plan_of(1);
    return run_grid(random, [&](CopyingWarp& warp, const Channel& channel, int32_t peer_warp) {
      return peer_warp < 0 ? TokenSummer<CopyingWarp, kWords>(warp, channel, num_tokens_).run()
                           : RowSender<CopyingWarp, kWords>(warp, channel, shape_, peer_warp).run();
    });
  }

  // Checks what came, and makes experts' rows of it.
  bool check_rows(int32_t number, const Round& round) {
    for (int32_t source = 0; source < workspace_.geometry.ep_size; ++source) {
      int32_t row = 0;
      for (int32_t t = 0; t < round.num_tokens[static_cast<size_t>(source)]; ++t) {
        if (!goes(round, source, t, workspace_.ep_rank)) continue;
        for (int64_t b = 0; b < tensors_.record_bytes; ++b) {
          if (tensors_.record(source, row)[b] != byte_of(number, source, t, b)) {
            return complain("row", number, row, b);
          }
        }
        auto* out = reinterpret_cast<float*>(tensors_.expert_row(source, row));
        for (int64_t c = 0; c < tensors_.columns(); ++c) {
          out[c] = value_of(number, source, t, workspace_.ep_rank, c);
        }
        ++row;
      }
    }
    return true;
  }
  bool check_sums(int32_t number, const Round& round) const {
    for (int32_t t = 0; t < num_tokens_; ++t) {
      for (int64_t c = 0; c < tensors_.columns(); ++c) {
        float sum = 0.0f;
        for (int32_t owner = 0; owner < workspace_.geometry.ep_size; ++owner) {
          if (!goes(round, workspace_.ep_rank, t, owner)) continue;
          sum += value_of(number, workspace_.ep_rank, t, owner, c);
        }
        const auto at = static_cast<size_t>(t * tensors_.columns() + c);
        if (tensors_.sums[at] != sum) return complain("sum", number, t, c);
      }
    }
    return true;
  }

 private:
  static bool goes(const Round& round, int32_t source, int32_t token, int32_t owner) {
    return round
        .goes[static_cast<size_t>(source)][static_cast<size_t>(token)][static_cast<size_t>(owner)];
  }
  int32_t rows_before(const Round& round, int32_t source, int32_t owner, int32_t bound) const {
    const int32_t end =
        token_at_bound(round.num_tokens[static_cast<size_t>(source)], bound, case_.channels);
    int32_t rows = 0;
    for (int32_t t = 0; t < end; ++t) rows += goes(round, source, t, owner) ? 1 : 0;
    return rows;
  }

  StreamPlan plan_of(int32_t joined) const {
    return StreamPlan::of(workspace_.geometry, joined, case_.record_chunks, kCapacity);
  }

  // A grid of as many CTAs as the case has, whose warps take groups of channels together.
  template <typename Role>
  bool run_grid(std::mt19937& random, const Role& role) {
    std::atomic<bool> good{true};
    std::vector<std::thread> threads;
    std::deque<std::barrier<>> barriers;
    std::vector<int32_t> taken(static_cast<size_t>(case_.ctas));
    for (int32_t cta = 0; cta < case_.ctas; ++cta) {
      auto& barrier = barriers.emplace_back(CtaShape::kWarps);
      int32_t& group = taken[static_cast<size_t>(cta)];
      const auto delay = std::chrono::microseconds(random() % 4 == 0 ? random() % 2000 : 0);
      for (int32_t w = 0; w < CtaShape::kWarps; ++w) {
        threads.emplace_back([&, w, delay] {
          std::this_thread::sleep_for(delay);
          for (;;) {
            barrier.arrive_and_wait();
            if (w == 0) group = next_group_++;
            barrier.arrive_and_wait();
            if (group >= shape_.groups(plan_)) return;
            const int32_t number = group * shape_.channels + w / shape_.warps_per_channel();
            if (number >= plan_.busy_channels()) continue;
            CopyingWarp warp(moves_, tensors_);
            const Channel channel{workspace_, layout_, plan_, send_tokens_.data(), number};
            if (!role(warp, channel, w % shape_.warps_per_channel() - 1)) good = false;
          }
        });
      }
    }
    for (std::thread& thread : threads) thread.join();
    if (!good) std::printf("rank %d: a wait did not end\n", workspace_.ep_rank);
    return good;
  }

  bool complain(const char* what, int32_t round, int64_t row, int64_t column) const {
    std::printf("rank %d, round %d: wrong %s at row %ld, column %ld\n", workspace_.ep_rank, round,
                what, static_cast<long>(row), static_cast<long>(column));
    return false;
  }

  Moves& moves_;
  WorkspaceView workspace_;
  FifoLayout layout_;
  Case case_;
  CtaShape shape_;  // of the stream at hand, as what follows
  StreamPlan plan_;
  int32_t num_tokens_ = 0;
  std::vector<int32_t> send_tokens_;
  Tensors tensors_;
  std::atomic<int32_t> next_group_{0};
};

Round draw_round(std::mt19937& random, int32_t ranks) {
  Round round;
  for (int32_t r = 0; r < ranks; ++r) {
    const auto n = static_cast<int32_t>(random() % (kCapacity + 1));
    round.num_tokens.push_back(n);
    std::vector<std::vector<bool>> goes(static_cast<size_t>(n));
    const auto often = random() % 3;  // of four
    for (auto& of_token : goes) {
      for (int32_t owner = 0; owner < ranks; ++owner) of_token.push_back(random() % 4 <= often);
    }
    round.goes.push_back(goes);
  }
  return round;
}

bool run_case(const Case& the_case, int32_t ranks, int32_t rounds, uint32_t first, uint32_t seed) {
  const two_sided::Geometry geometry = two_sided::valid_geometry(
      ranks, 2 * ranks, 2, kCapacity, the_case.slots, the_case.slot_bytes, the_case.channels, 1);
  const uint64_t stride = FifoLayout::of(geometry).segment_bytes;
  auto* base = static_cast<uint8_t*>(
      std::aligned_alloc(kRegionAlignment, stride * static_cast<uint64_t>(ranks)));
  std::mt19937 random(seed);
  std::vector<Round> plan;
  for (int32_t i = 0; i < rounds; ++i) plan.push_back(draw_round(random, ranks));

  std::atomic<bool> good{true};
  Moves moves{0};
  std::barrier meeting(ranks);
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      std::mt19937 delays(seed + static_cast<uint32_t>(r));
      Rank rank({base, static_cast<int64_t>(stride), r, geometry}, the_case, first, moves);
      for (int32_t i = 0; i < rounds; ++i) {
        const Round& round = plan[static_cast<size_t>(i)];
        rank.prepare(i, round);
        meeting.arrive_and_wait();  // as the headers of prepare, and the flags of combine
        bool ok = rank.alltoallv(delays) && rank.check_rows(i, round);
        meeting.arrive_and_wait();
        ok = rank.combine(delays) && ok && rank.check_sums(i, round);
        if (!ok) good = false;
        meeting.arrive_and_wait();
        if (!good) return;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::free(base);
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  const int32_t ranks = argc > 1 ? std::atoi(argv[1]) : 3;
  const int32_t rounds = argc > 2 ? std::atoi(argv[2]) : 20;
  const auto first = static_cast<uint32_t>(argc > 3 ? std::strtoul(argv[3], nullptr, 0) : 0);
  const auto seed = static_cast<uint32_t>(argc > 4 ? std::atoi(argv[4]) : 1);
  for (const Case& the_case : kCases) {
    if (!run_case(the_case, ranks, rounds, first, seed)) return 1;
  }
  std::printf("%d rounds of %d ranks, every element right\n", rounds, ranks);
  return 0;
}
