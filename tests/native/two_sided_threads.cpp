// The two-sided transport with ranks as threads (thread_rounds.h) over FIFOs of two small slots.
// Built with -fsanitize=thread it also shows that heads, tails and bells order all that they must.
#include <cstdint>
#include <vector>

#include "thread_rounds.h"
#include "two_sided/cpu.h"
#include "two_sided/segment.h"

using namespace moe_ep;

namespace {

constexpr int64_t kIdBytes = kTopK * 4;
int32_t timeout_sec = 15;

class Rank : Player {
 public:
  Rank(uint8_t* base, const two_sided::Geometry& geometry, int32_t rank, uint32_t seed)
      : Player(rank, geometry.ep_size, seed),
        workspace_{base, static_cast<int64_t>(two_sided::FifoLayout::of(geometry).segment_bytes),
                   rank, geometry} {}

  // As if `first` rounds had gone before, and as many slots through each FIFO.
  void initialize(uint32_t first) {
    two_sided::initialize(workspace_);
    const two_sided::FifoLayout layout = two_sided::FifoLayout::of(workspace_.geometry);
    const two_sided::Segment own(workspace_, layout, me_);
    own.control().epoch = first;
    *own.bell() = first;
    for (int32_t peer = 0; peer < ranks_; ++peer) {
      own.round_header(peer).dispatched = first;
      own.combine_flag(peer).ready = first;
      *own.head(peer) = first;
      *own.tail(peer) = first;
    }
  }

  bool run(int32_t number, const Round& round) {
    maybe_sleep();
    if (!dispatch(number, round) || !check_dispatch(number, round)) return false;
    maybe_sleep();
    return combine(number, round);
  }

 private:
  bool dispatch(int32_t number, const Round& round) {
    const int32_t n = round.tokens_of(me_);
    const std::vector<int32_t>& own_ids = round.ids[static_cast<size_t>(me_)];
    const std::vector<int64_t> wide_ids(own_ids.begin(), own_ids.end());
    const std::vector<float> rows = rows_of(number, round);
    const auto ranks = static_cast<size_t>(ranks_);
    const size_t max_rows = ranks * kCapacity;
    std::vector<int32_t> ids(own_ids.size()), send_counts(ranks);
    std::vector<RoundHeader> headers(ranks);
    send_tokens_.assign(static_cast<size_t>(n * workspace_.geometry.max_destinations()), 0);
    recv_counts_.assign(ranks, 0);

    two_sided::PrepareParams p{};
    p.workspace = workspace_;
    p.num_tokens = n;
    p.tokens_per_rank = kCapacity;
    p.ids_are_int64 = (number + me_) % 2 == 0;
    p.topk_ids = p.ids_are_int64 ? static_cast<const void*>(wide_ids.data()) : own_ids.data();
    p.invalid_expert_id = -1;
    p.fields = {2, {kRowBytes, kIdBytes}};
    p.timeout_sec = timeout_sec;
    p.out_topk_ids = ids.data();
    p.out_send_tokens = send_tokens_.data();
    p.out_send_counts = send_counts.data();
    p.out_recv_counts = recv_counts_.data();
    p.out_headers = headers.data();
    if (number % 8 == 7 && ranks_ > 1) {
      p.has_weights = me_ == 0;
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
    a.timeout_sec = timeout_sec;
    return two_sided::alltoallv(a) == Outcome::kDone || complain("alltoallv", number, 0, 0);
  }

  bool check_dispatch(int32_t number, const Round& round) const {
    for (int32_t source = 0; source < ranks_; ++source) {
      int32_t row = source * kCapacity;
      for (int32_t t = 0; t < round.tokens_of(source); ++t) {
        if (!round.goes(partition_, source, t, me_)) continue;
        for (int32_t c = 0; c < kHidden; ++c) {
          const float value = received_[static_cast<size_t>(row * kHidden + c)];
          if (value != value_of(number, source, t, c)) return complain("row", number, row, c);
        }
        for (int32_t k = 0; k < kTopK; ++k) {
          const int32_t id = received_ids_[static_cast<size_t>(row * kTopK + k)];
          if (id != round.id(source, t, k)) return complain("id", number, row, k);
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
    const int32_t n = round.tokens_of(me_);
    for (float& value : received_) value *= static_cast<float>(me_ + 1);
    std::vector<float> output(static_cast<size_t>(n) * kHidden);
    two_sided::CombineParams c{};
    c.workspace = workspace_;
    c.num_tokens = n;
    c.tokens_per_rank = kCapacity;
    c.hidden_size = kHidden;
    c.row_type = RowType::kFloat32;
    c.send_tokens = send_tokens_.data();
    c.expert_output = {reinterpret_cast<const uint8_t*>(received_.data()), kRowBytes, kRowBytes};
    c.timeout_sec = timeout_sec;
    c.output = reinterpret_cast<uint8_t*>(output.data());
    if (two_sided::combine(c) != Outcome::kDone) return complain("combine", number, 0, 0);
    return check_sums(number, round, output);
  }

  two_sided::WorkspaceView workspace_;
  std::vector<int32_t> send_tokens_;
  std::vector<int32_t> recv_counts_;
  std::vector<float> received_;
  std::vector<int32_t> received_ids_;
};

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments(argc, argv);
  if (argc > 5) timeout_sec = std::atoi(argv[5]);
  bool good = true;
  // A dispatch record in one slot, and in three.
  for (const int64_t slot_bytes : {kRowBytes + kIdBytes, int64_t{100}}) {
    const two_sided::Geometry geometry = two_sided::valid_geometry(
        arguments.ranks, kNumExperts, kTopK, kCapacity, 2, slot_bytes, 1, 1);
    const uint64_t segment_bytes = two_sided::FifoLayout::of(geometry).segment_bytes;
    good = good && play<Rank>(arguments, geometry, segment_bytes);
  }
  return arguments.verdict(good);
}
