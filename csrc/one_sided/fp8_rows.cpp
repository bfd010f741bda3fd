#include "one_sided/fp8_rows.h"

#include <algorithm>
#include <cstring>

#include "transport/row_vectors.h"

namespace moe_ep::one_sided {
namespace {

using Bytes [[gnu::vector_size(kLanes * sizeof(uint8_t))]] = uint8_t;

// e4m3_to_float of core/float_formats.h, lane by lane.
[[gnu::always_inline]] inline Floats load_e4m3(const uint8_t* at) {
  Bytes codes;
  std::memcpy(&codes, at, sizeof(codes));
  const Words bits = __builtin_convertvector(codes, Words);
  const Words magnitude = bits & 0x7F;
  const Floats small = __builtin_convertvector(magnitude, Floats) * (1.0f / (1 << 9));
  const Words normal = (magnitude << 20) + ((kFloatExponentBias - 7) << kFloatMantissaBits);
  const Words finite = magnitude < 0x08 ? __builtin_bit_cast(Words, small) : normal;
  const Words number = magnitude < 0x7F ? finite : Words{} + kFloat32Nan;
  return __builtin_bit_cast(Floats, ((bits & 0x80) << 24) | number);
}

constexpr int64_t kUnroll = 4;  // as in reduce_rows.cpp
constexpr int64_t kStep = kUnroll * kLanes;
static_assert(kFp8Block % kStep == 0, "a step has one scale");

// Elements [first, first + count) of the sum; count is at most kStep. The others of the step are
// zero, or NaN.
[[gnu::always_inline]] inline void sum_step(const uint8_t* const* rows, int32_t num_rows,
                                            const Fp8Row& row, int64_t first, int64_t count,
                                            Floats (&sum)[kUnroll]) {
  for (int64_t v = 0; v < kUnroll; ++v) sum[v] = Floats{};
  const int64_t scale_at =
      row.scales_offset + first / kFp8Block * static_cast<int64_t>(sizeof(float));
  uint8_t last[kStep] = {};
  for (int32_t r = 0; r < num_rows; ++r) {
    const uint8_t* codes = rows[r] + first;
    if (count < kStep) {
      std::memcpy(last, codes, static_cast<size_t>(count));
      codes = last;
    }
    float scale;
    std::memcpy(&scale, rows[r] + scale_at, sizeof(scale));
    for (int64_t v = 0; v < kUnroll; ++v) sum[v] += load_e4m3(codes + v * kLanes) * scale;
  }
}

template <typename Rows>
[[gnu::always_inline]] inline void reduce(const uint8_t* const* rows, int32_t num_rows,
                                          int64_t hidden_size, uint8_t* out) {
  constexpr int64_t kBytes = sizeof(typename Rows::Element);
  const Fp8Row row = Fp8Row::of(hidden_size);
  uint8_t rounded[kStep * kBytes];
  for (int64_t first = 0; first < hidden_size; first += kStep) {
    const int64_t count = std::min(kStep, hidden_size - first);
    Floats sum[kUnroll];
    sum_step(rows, num_rows, row, first, count, sum);
    for (int64_t v = 0; v < kUnroll; ++v) Rows::store(sum[v], rounded + v * kLanes * kBytes);
    std::memcpy(out + first * kBytes, rounded, static_cast<size_t>(count * kBytes));
  }
}

template <typename Rows>
[[gnu::always_inline]] inline void quantize(const uint8_t* in, int64_t hidden_size, uint8_t* out) {
  constexpr int64_t kBytes = sizeof(typename Rows::Element);
  const Fp8Row row = Fp8Row::of(hidden_size);
  for (int64_t b = 0; b < row.num_blocks; ++b) {
    const int64_t first = b * kFp8Block;
    const int64_t count = std::min(kFp8Block, hidden_size - first);
    const uint8_t* elements = in + first * kBytes;
    uint8_t last[kFp8Block * kBytes] = {};  // the last block is filled up with zeros
    if (count < kFp8Block) {
      std::memcpy(last, elements, static_cast<size_t>(count * kBytes));
      elements = last;
    }
    alignas(sizeof(Floats)) float block[kFp8Block];
    for (int64_t i = 0; i < kFp8Block; i += kLanes) {
      const Floats values = Rows::load(elements + i * kBytes);
      std::memcpy(block + i, &values, sizeof(values));
    }
    uint8_t codes[kFp8Block];
    const float scale = quantize_fp8_block(block, codes);
    std::memcpy(out + first, codes, static_cast<size_t>(count));
    std::memcpy(out + row.scales_offset + b * static_cast<int64_t>(sizeof(scale)), &scale,
                sizeof(scale));
  }
}

MOE_EP_SIMD_CLONES void quantize_float32(const uint8_t* row, int64_t hidden_size, uint8_t* out) {
  quantize<Float32Rows>(row, hidden_size, out);
}
MOE_EP_SIMD_CLONES void quantize_float16(const uint8_t* row, int64_t hidden_size, uint8_t* out) {
  quantize<Float16Rows>(row, hidden_size, out);
}
MOE_EP_SIMD_CLONES void quantize_bfloat16(const uint8_t* row, int64_t hidden_size, uint8_t* out) {
  quantize<BFloat16Rows>(row, hidden_size, out);
}

MOE_EP_SIMD_CLONES void reduce_to_float32(const uint8_t* const* rows, int32_t num_rows,
                                          int64_t hidden_size, uint8_t* out) {
  reduce<Float32Rows>(rows, num_rows, hidden_size, out);
}
MOE_EP_SIMD_CLONES void reduce_to_float16(const uint8_t* const* rows, int32_t num_rows,
                                          int64_t hidden_size, uint8_t* out) {
  reduce<Float16Rows>(rows, num_rows, hidden_size, out);
}
MOE_EP_SIMD_CLONES void reduce_to_bfloat16(const uint8_t* const* rows, int32_t num_rows,
                                           int64_t hidden_size, uint8_t* out) {
  reduce<BFloat16Rows>(rows, num_rows, hidden_size, out);
}

}  // namespace

void quantize_row_to_fp8(const uint8_t* row, int64_t hidden_size, RowType type, uint8_t* out) {
  switch (type) {
    case RowType::kFloat32:
      return quantize_float32(row, hidden_size, out);
    case RowType::kFloat16:
      return quantize_float16(row, hidden_size, out);
    case RowType::kBFloat16:
      return quantize_bfloat16(row, hidden_size, out);
  }
}

void reduce_fp8_rows(const uint8_t* const* rows, int32_t num_rows, int64_t hidden_size,
                     RowType type, uint8_t* out) {
  switch (type) {
    case RowType::kFloat32:
      return reduce_to_float32(rows, num_rows, hidden_size, out);
    case RowType::kFloat16:
      return reduce_to_float16(rows, num_rows, hidden_size, out);
    case RowType::kBFloat16:
      return reduce_to_bfloat16(rows, num_rows, hidden_size, out);
  }
}

// Rounding to float32 changes nothing but the bits of NaNs.
void reduce_fp8_rows_to_float(const uint8_t* const* rows, int32_t num_rows, int64_t hidden_size,
                              float* out) {
  reduce_to_float32(rows, num_rows, hidden_size, reinterpret_cast<uint8_t*>(out));
}

}  // namespace moe_ep::one_sided
