// How rows are copied into segments: through the caches, or around them when a round is larger than
// they are.
//
// A row that will be out of the cache before anyone reads it should not be read in to be written:
// with streaming stores a round of 1024 tokens on 4 ranks and 2 cores took 0.67 to 0.79 of the time
// (hidden sizes 2048 and 7168, transport alone), 0.8 and 0.94 through the Python API. Where the
// rows fit, their reader wants them there.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace moe_ep {

// Of the last-level cache of this machine's processors; where it cannot be read, far more than any.
int64_t cache_bytes();

// What all ranks together write in a round, if every token goes to every rank.
constexpr int64_t bytes_of_round(int64_t ep_size, int64_t tokens_per_rank, int64_t row_bytes) {
  return ep_size * ep_size * tokens_per_rank * row_bytes;
}

class RowCopy {
 public:
  explicit RowCopy(int64_t bytes_of_round) : streams_(bytes_of_round >= 2 * cache_bytes()) {}

  void operator()(uint8_t* to, const uint8_t* from, int64_t bytes) const {
#if defined(__x86_64__)
    constexpr int64_t kLine = 64;
    if (streams_ && bytes % kLine == 0 && reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0) {
      auto* out = reinterpret_cast<__m128i*>(to);
      const auto* in = reinterpret_cast<const __m128i*>(from);
      for (int64_t i = 0; i < bytes / static_cast<int64_t>(sizeof(__m128i)); i += 4) {
        const __m128i a = _mm_loadu_si128(in + i), b = _mm_loadu_si128(in + i + 1),
                      c = _mm_loadu_si128(in + i + 2), d = _mm_loadu_si128(in + i + 3);
        _mm_stream_si128(out + i, a);
        _mm_stream_si128(out + i + 1, b);
        _mm_stream_si128(out + i + 2, c);
        _mm_stream_si128(out + i + 3, d);
      }
      return;
    }
#endif
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }

  // Streaming stores are not ordered by a later release: each thread that copied calls this before
  // it ends.
  void finish() const {
#if defined(__x86_64__)
    if (streams_) _mm_sfence();
#endif
  }

 private:
  bool streams_;
};

}  // namespace moe_ep
