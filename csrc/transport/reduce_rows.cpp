#include "transport/reduce_rows.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/limits.h"
#include "core/quantize_row.h"
#include "transport/row_vectors.h"

namespace moe_ep {
namespace {

// Four vectors at a time hide the latency of the additions.
constexpr int64_t kUnroll = 4;
constexpr int64_t kBlock = kUnroll * kLanes;

// What rows without factors are multiplied by: that changes no bit of a sum.
constexpr auto kOnes = [] {
  std::array<float, kMaxTopK> ones{};
  ones.fill(1.0f);
  return ones;
}();

// Products are rounded before they are added: this must not be compiled to fused multiplications
// and additions (setup.py sees to it).
template <typename Rows>
[[gnu::always_inline]] inline void sum_block(const uint8_t* const* rows, const float* factors,
                                             int32_t num_rows, int64_t byte,
                                             Floats (&sum)[kUnroll]) {
  constexpr int64_t kVectorBytes = kLanes * static_cast<int64_t>(sizeof(typename Rows::Element));
  for (int64_t v = 0; v < kUnroll; ++v) sum[v] = Floats{};
  for (int32_t r = 0; r < num_rows; ++r) {
    for (int64_t v = 0; v < kUnroll; ++v) {
      sum[v] += Rows::load(rows[r] + byte + v * kVectorBytes) * factors[r];
    }
  }
}

template <typename Rows>
[[gnu::always_inline]] inline void reduce_block(const uint8_t* const* rows, const float* factors,
                                                int32_t num_rows, int64_t byte, uint8_t* out) {
  constexpr int64_t kVectorBytes = kLanes * static_cast<int64_t>(sizeof(typename Rows::Element));
  Floats sum[kUnroll];
  sum_block<Rows>(rows, factors, num_rows, byte, sum);
  for (int64_t v = 0; v < kUnroll; ++v) Rows::store(sum[v], out + v * kVectorBytes);
}

// Copies of the last, shorter block of every row, filled up with zeros.
template <typename Rows>
struct Tail {
  static constexpr int64_t kBlockBytes =
      kBlock * static_cast<int64_t>(sizeof(typename Rows::Element));

  Tail(const uint8_t* const* rows, int32_t num_rows, int64_t byte, int64_t bytes) {
    for (int32_t r = 0; r < num_rows; ++r) {
      std::memset(copies[r], 0, sizeof(copies[r]));
      std::memcpy(copies[r], rows[r] + byte, static_cast<size_t>(bytes));
      pointers[r] = copies[r];
    }
  }
  uint8_t copies[kMaxTopK][kBlockBytes];
  const uint8_t* pointers[kMaxTopK];
};

template <typename Rows>
[[gnu::always_inline]] inline void reduce(const uint8_t* const* rows, const float* factors,
                                          int32_t num_rows, int64_t hidden_size, uint8_t* out) {
  constexpr int64_t kBlockBytes = Tail<Rows>::kBlockBytes;
  const int64_t bytes = hidden_size * static_cast<int64_t>(sizeof(typename Rows::Element));
  int64_t byte = 0;
  for (; byte + kBlockBytes <= bytes; byte += kBlockBytes) {
    reduce_block<Rows>(rows, factors, num_rows, byte, out + byte);
  }
  if (byte == bytes) return;
  const Tail<Rows> tail(rows, num_rows, byte, bytes - byte);
  uint8_t block[kBlockBytes];
  reduce_block<Rows>(tail.pointers, factors, num_rows, 0, block);
  std::memcpy(out + byte, block, static_cast<size_t>(bytes - byte));
}

template <typename Rows>
[[gnu::always_inline]] inline void reduce_to_float(const uint8_t* const* rows, int32_t num_rows,
                                                   int64_t hidden_size, float* out) {
  constexpr int64_t kElementBytes = sizeof(typename Rows::Element);
  Floats sum[kUnroll];
  int64_t i = 0;
  for (; i + kBlock <= hidden_size; i += kBlock) {
    sum_block<Rows>(rows, kOnes.data(), num_rows, i * kElementBytes, sum);
    std::memcpy(out + i, sum, sizeof(sum));
  }
  if (i == hidden_size) return;
  const Tail<Rows> tail(rows, num_rows, i * kElementBytes, (hidden_size - i) * kElementBytes);
  sum_block<Rows>(tail.pointers, kOnes.data(), num_rows, 0, sum);
  std::memcpy(out + i, sum, static_cast<size_t>(hidden_size - i) * sizeof(float));
}

MOE_EP_SIMD_CLONES void reduce_float32(const uint8_t* const* rows, const float* factors,
                                       int32_t num_rows, int64_t hidden_size, uint8_t* out) {
  reduce<Float32Rows>(rows, factors, num_rows, hidden_size, out);
}
MOE_EP_SIMD_CLONES void reduce_float16(const uint8_t* const* rows, const float* factors,
                                       int32_t num_rows, int64_t hidden_size, uint8_t* out) {
  reduce<Float16Rows>(rows, factors, num_rows, hidden_size, out);
}
MOE_EP_SIMD_CLONES void reduce_bfloat16(const uint8_t* const* rows, const float* factors,
                                        int32_t num_rows, int64_t hidden_size, uint8_t* out) {
  reduce<BFloat16Rows>(rows, factors, num_rows, hidden_size, out);
}

}  // namespace

void reduce_weighted_rows(const uint8_t* const* rows, const float* factors, int32_t num_rows,
                          int64_t hidden_size, RowType type, uint8_t* out) {
  switch (type) {
    case RowType::kFloat32:
      return reduce_float32(rows, factors, num_rows, hidden_size, out);
    case RowType::kFloat16:
      return reduce_float16(rows, factors, num_rows, hidden_size, out);
    case RowType::kBFloat16:
      return reduce_bfloat16(rows, factors, num_rows, hidden_size, out);
  }
}

void reduce_rows(const uint8_t* const* rows, int32_t num_rows, int64_t hidden_size, RowType type,
                 uint8_t* out) {
  reduce_weighted_rows(rows, kOnes.data(), num_rows, hidden_size, type, out);
}

void reduce_rows_to_float(const uint8_t* const* rows, int32_t num_rows, int64_t hidden_size,
                          RowType type, float* out) {
  switch (type) {
    case RowType::kFloat32:
      return reduce_to_float<Float32Rows>(rows, num_rows, hidden_size, out);
    case RowType::kFloat16:
      return reduce_to_float<Float16Rows>(rows, num_rows, hidden_size, out);
    case RowType::kBFloat16:
      return reduce_to_float<BFloat16Rows>(rows, num_rows, hidden_size, out);
  }
}

void poison_sums(int64_t elements, RowType type, uint8_t* out) {
  switch (type) {
    case RowType::kFloat32:
      std::fill_n(reinterpret_cast<uint32_t*>(out), elements, kFloat32Nan);
      break;
    case RowType::kFloat16:
      std::fill_n(reinterpret_cast<uint16_t*>(out), elements, kFloat16Nan);
      break;
    case RowType::kBFloat16:
      std::fill_n(reinterpret_cast<uint16_t*>(out), elements, kBFloat16Nan);
      break;
  }
}

MOE_EP_SIMD_CLONES void quantize_sum(const QuantizedRows& out, int64_t token, const float* sum) {
  quantize_row(out, token, sum);
}

}  // namespace moe_ep
