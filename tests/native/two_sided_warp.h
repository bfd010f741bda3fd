// A warp of the two-sided CUDA kernels as a thread of one lane: the Machine of
// csrc/two_sided/roles, with its copies. It ends the program where a role publishes without a fence
// or loads over a load.
#pragma once

#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "core/atomics.h"
#include "core/limits.h"
#include "two_sided/channels.h"

namespace moe_ep::two_sided {

inline constexpr int32_t kCapacity = 9;  // tokens of a rank
// A wait never ends if nobody has moved anything for so long: no machine is too busy for that.
inline std::chrono::seconds patience{10};

// Counts what any warp of any rank publishes. Orders nothing, so that it hides no race.
using Moves = std::atomic<uint64_t>;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// A warp of one lane.
class ThreadWarp {
 public:
  static constexpr int32_t kLanes = 1;

  explicit ThreadWarp(Moves& moves) : moves_(moves) {}

  static int32_t lane() { return 0; }
  static uint32_t ballot(bool says) { return says ? 1 : 0; }
  template <typename Value>
  static Value from_lane(Value value, int32_t) {
    return value;
  }
  static int32_t least(int32_t value) { return value; }
  static int32_t lowest(uint32_t bits) { return std::countr_zero(bits); }
  static int32_t count(uint32_t bits) { return std::popcount(bits); }
  static void sync() {}
  static uint32_t poll(const uint32_t* word) { return load_acquire(word); }
  // The thread sanitizer knows no fences: here one is a second look, which acquires, and a mark
  // that what was written before may be released.
  uint32_t peek(const uint32_t* word) {
    peeked_.push_back(word);
    return Atomic32(*const_cast<uint32_t*>(word)).load(std::memory_order_relaxed);
  }
  void fence() {
    for (const uint32_t* word : peeked_) (void)load_acquire(word);
    peeked_.clear();
    is_fenced_ = true;
  }
  void post(uint32_t* word, uint32_t value) {
    if (!is_fenced_) fail("a post without a fence behind what it releases");
    store_release(word, value);
    moves_.fetch_add(1, std::memory_order_relaxed);
  }
  uint8_t** row_list() { return rows_; }
  void moved() { since_ = std::chrono::steady_clock::now(); }
  static bool counts_to_look() {
    std::this_thread::yield();
    return true;
  }
  bool has_run_out(int32_t) {
    const uint64_t moves = moves_.load(std::memory_order_relaxed);
    if (moves != seen_) moved();
    seen_ = moves;
    return std::chrono::steady_clock::now() - since_ > patience;
  }

 protected:
  // Reads or writes what others will write or read.
  void copies() { is_fenced_ = false; }

 private:
  Moves& moves_;
  std::vector<const uint32_t*> peeked_;
  bool is_fenced_ = false;
  uint64_t seen_ = 0;
  uint8_t* rows_[kMaxTopK];
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

// One rank's tensors of a round.
struct Tensors {
  int64_t record_bytes;
  int32_t ep_rank;
  std::vector<uint8_t> given;     // records by token
  std::vector<uint8_t> received;  // records, kCapacity from each source
  std::vector<float> experts;     // rows for received rows
  std::vector<float> sums;

  int64_t columns() const { return record_bytes / 4; }
  uint8_t* record(int32_t source, int32_t row) {
    return received.data() + (int64_t{source} * kCapacity + row) * record_bytes;
  }
  uint8_t* expert_row(int32_t source, int32_t row) {
    return reinterpret_cast<uint8_t*>(experts.data()) +
           (int64_t{source} * kCapacity + row) * record_bytes;
  }
};

class CopyingWarp : public ThreadWarp {
 public:
  CopyingWarp(Moves& moves, Tensors& tensors) : ThreadWarp(moves), t_(tensors) {}
  ~CopyingWarp() {
    if (is_loading_) fail("a warp that ends with a load under way");
  }

  void drop_load() { is_loading_ = false; }
  void load_record(const Item& item, int32_t token) {
    begin_load();
    append(t_.given.data() + token * t_.record_bytes, item);
  }
  void store_record(const Item& item, int32_t, uint8_t* const* places, int32_t count,
                    int32_t own_row) {
    end_load();
    for (int32_t j = 0; j < count; ++j) std::memcpy(places[j], stage_.data(), bytes(item));
    if (own_row < 0) return;
    std::memcpy(t_.record(t_.ep_rank, own_row) + begin(item), stage_.data(), bytes(item));
  }
  template <typename Free>
  void receive_slot(const Item& item, int32_t source, int32_t row, int32_t count,
                    const uint8_t* slot, const Free& free) {
    for (int32_t j = 0; j < count; ++j) {
      std::memcpy(t_.record(source, row + j) + begin(item), slot + j * item.bytes(), bytes(item));
    }
    copies();
    free();
  }
  void load_rows(const Item& item, int32_t source, int32_t row, int32_t count) {
    begin_load();
    for (int32_t j = 0; j < count; ++j) append(t_.expert_row(source, row + j), item);
  }
  void store_rows(const Item&, int32_t, int32_t, int32_t, uint8_t* slot) {
    end_load();
    std::memcpy(slot, stage_.data(), stage_.size());
  }
  const uint8_t* own_row(const Item& item, int32_t row) {
    return t_.expert_row(t_.ep_rank, row) + begin(item);
  }
  template <typename Free>
  void sum_rows(const Item& item, int32_t token, uint8_t* const* rows, int32_t count,
                const Free& free) {
    float* out = t_.sums.data() + token * t_.columns() + begin(item) / 4;
    for (int64_t column = 0; column < item.bytes() / 4; ++column) {
      out[column] = 0.0f;
      for (int32_t j = 0; j < count; ++j) {
        float value;
        std::memcpy(&value, rows[j] + column * 4, sizeof(value));
        out[column] += value;
      }
    }
    copies();
    free();
  }
  void poison(const Item&, int32_t) {}  // the sums are wrong as they are

 private:
  static int64_t begin(const Item& item) { return int64_t{item.begin} * 16; }
  static size_t bytes(const Item& item) { return static_cast<size_t>(item.bytes()); }
  void begin_load() {
    if (is_loading_) fail("a load over one that is under way");
    is_loading_ = true;
    stage_.clear();
  }
  // For stores of what was loaded.
  void end_load() {
    is_loading_ = false;
    copies();
  }
  void append(const uint8_t* record, const Item& item) {
    stage_.insert(stage_.end(), record + begin(item), record + begin(item) + bytes(item));
  }

  Tensors& t_;
  std::vector<uint8_t> stage_;
  bool is_loading_ = false;
};

}  // namespace moe_ep::two_sided
