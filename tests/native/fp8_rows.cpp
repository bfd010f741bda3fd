// Do cake's vectorised functions on FP8 rows do what core/scaled_fp8.h says, element by element?
// All row types, sizes around the vector width and the scale's block, random bit patterns (with few
// infinities and NaNs, which take their whole block with them).
#include "one_sided/fp8_rows.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "core/float_formats.h"

using namespace moe_ep;
using namespace moe_ep::one_sided;

namespace {

// Rows, and their scales, begin on cache lines where that costs no line more.
static_assert(Fp8Row::of(7168).pitch == 7424 && Fp8Row::of(7168).scales_offset == 7168);
static_assert(Fp8Row::of(200).pitch == 256 && Fp8Row::of(200).scales_offset == 248);

using Row = std::vector<uint8_t>;

size_t bytes_of(int64_t elements, RowType type) {
  return static_cast<size_t>(elements * row_type_bytes(type));
}

float element(RowType type, const Row& row, int64_t i) {
  if (type == RowType::kFloat32) {
    float value;
    std::memcpy(&value, row.data() + i * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, row.data() + i * 2, 2);
  return type == RowType::kBFloat16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

uint32_t rounded(RowType type, float sum) {
  if (type == RowType::kFloat32) return sum != sum ? kFloat32Nan : float_bits(sum);
  return type == RowType::kBFloat16 ? float_to_bf16(sum) : float_to_fp16(sum);
}

uint32_t bits_of(RowType type, const Row& row, int64_t i) {
  uint32_t bits = 0;
  std::memcpy(&bits, row.data() + bytes_of(i, type), bytes_of(1, type));
  return bits;
}

// What the row's elements become; compares the stored bytes on the way.
bool quantize(RowType type, int64_t hidden_size, const Row& row, Row& stored,
              std::vector<float>& numbers) {
  constexpr uint8_t kGuard = 0xA5;
  const Fp8Row place = Fp8Row::of(hidden_size);
  const auto pitch = static_cast<size_t>(place.pitch);
  stored.assign(pitch + 1, kGuard);
  quantize_row_to_fp8(row.data(), hidden_size, type, stored.data());
  Row wanted(pitch + 1, kGuard);
  for (int64_t b = 0; b < place.num_blocks; ++b) {
    float block[kFp8Block] = {};
    for (int64_t i = 0; i < kFp8Block && b * kFp8Block + i < hidden_size; ++i) {
      block[i] = element(type, row, b * kFp8Block + i);
    }
    uint8_t codes[kFp8Block];
    const float scale = quantize_fp8_block(block, codes);
    std::memcpy(wanted.data() + place.scales_offset + b * 4, &scale, 4);
    for (int64_t i = 0; i < kFp8Block && b * kFp8Block + i < hidden_size; ++i) {
      wanted[static_cast<size_t>(b * kFp8Block + i)] = codes[i];
      numbers.push_back(e4m3_to_float(codes[i]) * scale);
    }
  }
  if (stored == wanted) return true;
  std::printf("type %d, hidden_size %ld: stored differently\n", static_cast<int>(type),
              static_cast<long>(hidden_size));
  return false;
}

bool check(RowType type, int64_t hidden_size, const std::vector<Row>& rows) {
  std::vector<Row> stored(rows.size());
  std::vector<std::vector<float>> numbers(rows.size());
  std::vector<const uint8_t*> pointers;
  for (size_t r = 0; r < rows.size(); ++r) {
    if (!quantize(type, hidden_size, rows[r], stored[r], numbers[r])) return false;
    pointers.push_back(stored[r].data());
  }
  const auto num_rows = static_cast<int32_t>(rows.size());
  Row out(bytes_of(hidden_size, type), 0xA5);
  std::vector<float> sums(static_cast<size_t>(hidden_size));
  reduce_fp8_rows(pointers.data(), num_rows, hidden_size, type, out.data());
  reduce_fp8_rows_to_float(pointers.data(), num_rows, hidden_size, sums.data());
  for (int64_t i = 0; i < hidden_size; ++i) {
    const auto column = static_cast<size_t>(i);
    float sum = 0.0f;
    for (const std::vector<float>& row : numbers) sum += row[column];
    const uint32_t wanted = rounded(type, sum);
    const bool same_sum = float_bits(sums[column]) == rounded(RowType::kFloat32, sum);
    if (same_sum && bits_of(type, out, i) == wanted) continue;
    std::printf("type %d, %d rows, hidden_size %ld, column %ld: wanted %08x, got %08x\n",
                static_cast<int>(type), num_rows, static_cast<long>(hidden_size),
                static_cast<long>(i), wanted, bits_of(type, out, i));
    return false;
  }
  return true;
}

// Of random bits; one in a thousand elements may be infinite or NaN.
Row random_row(RowType type, int64_t hidden_size, std::mt19937& random) {
  Row row(bytes_of(hidden_size, type));
  for (uint8_t& byte : row) byte = static_cast<uint8_t>(random());
  for (int64_t i = 0; i < hidden_size; ++i) {
    const float value = element(type, row, i);
    if (value - value == 0.0f || random() % 8 == 0) continue;
    row[bytes_of(i + 1, type) - 1] &= 0xBF;  // a smaller exponent
  }
  return row;
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (const RowType type : {RowType::kFloat32, RowType::kFloat16, RowType::kBFloat16}) {
    for (const int64_t hidden_size : {1, 3, 15, 16, 63, 64, 65, 127, 128, 129, 200, 256, 2880}) {
      for (const size_t num_rows : {0, 1, 2, 8, 32}) {
        std::vector<Row> rows;
        for (size_t r = 0; r < num_rows; ++r) {
          rows.push_back(random_row(type, hidden_size, random));
        }
        if (!check(type, hidden_size, rows)) return 1;
      }
    }
  }
  std::puts("every element right");
  return 0;
}
