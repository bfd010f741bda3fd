// Is the vectorised sum the plain sum, rounded by core/float_formats.h? All row types,
// sizes around the vector width, random bit patterns (NaN, infinities and subnormals among them),
// and every code of the 16-bit formats alone.
#include "transport/reduce_rows.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "core/float_formats.h"

using namespace moe_ep;

namespace {

using Row = std::vector<uint8_t>;

float element(RowType type, const uint8_t* row, int64_t i) {
  if (type == RowType::kFloat32) {
    float value;
    std::memcpy(&value, row + i * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, row + i * 2, 2);
  return type == RowType::kBFloat16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

uint32_t rounded(RowType type, float sum) {
  if (type == RowType::kFloat32) return sum != sum ? 0x7FC00000 : float_bits(sum);
  return type == RowType::kBFloat16 ? float_to_bf16(sum) : float_to_fp16(sum);
}

uint32_t bits_of(RowType type, const uint8_t* row, int64_t i) {
  uint32_t bits = 0;
  std::memcpy(&bits, row + i * row_type_bytes(type), static_cast<size_t>(row_type_bytes(type)));
  return bits;
}

// Each product is rounded to float32 before it is added.
bool check_weighted(RowType type, int64_t hidden_size, const std::vector<Row>& rows,
                    const std::vector<float>& factors) {
  std::vector<const uint8_t*> pointers;
  for (const Row& row : rows) pointers.push_back(row.data());
  const auto num_rows = static_cast<int32_t>(rows.size());
  Row out(static_cast<size_t>(hidden_size * row_type_bytes(type)), 0xA5);
  reduce_weighted_rows(pointers.data(), factors.data(), num_rows, hidden_size, type, out.data());
  for (int64_t i = 0; i < hidden_size; ++i) {
    float sum = 0.0f;
    for (size_t r = 0; r < rows.size(); ++r) {
      const volatile float product = element(type, rows[r].data(), i) * factors[r];
      sum += product;
    }
    if (rounded(type, sum) == bits_of(type, out.data(), i)) continue;
    std::printf("type %d, %d weighted rows, hidden_size %ld, column %ld: wanted %08x, got %08x\n",
                static_cast<int>(type), num_rows, static_cast<long>(hidden_size),
                static_cast<long>(i), rounded(type, sum), bits_of(type, out.data(), i));
    return false;
  }
  return true;
}

bool check(RowType type, int64_t hidden_size, const std::vector<Row>& rows) {
  std::vector<const uint8_t*> pointers;
  for (const Row& row : rows) pointers.push_back(row.data());
  const auto num_rows = static_cast<int32_t>(rows.size());
  Row out(static_cast<size_t>(hidden_size * row_type_bytes(type)), 0xA5);
  std::vector<float> sums(static_cast<size_t>(hidden_size));
  reduce_rows(pointers.data(), num_rows, hidden_size, type, out.data());
  reduce_rows_to_float(pointers.data(), num_rows, hidden_size, type, sums.data());
  for (int64_t i = 0; i < hidden_size; ++i) {
    float sum = 0.0f;
    for (const Row& row : rows) sum += element(type, row.data(), i);
    const float got = sums[static_cast<size_t>(i)];
    const bool same_sum = sum != sum ? got != got : float_bits(sum) == float_bits(got);
    if (same_sum && rounded(type, sum) == bits_of(type, out.data(), i)) continue;
    std::printf("type %d, %d rows, hidden_size %ld, column %ld: wanted %08x, got %08x\n",
                static_cast<int>(type), num_rows, static_cast<long>(hidden_size),
                static_cast<long>(i), rounded(type, sum), bits_of(type, out.data(), i));
    return false;
  }
  return true;
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (const RowType type : {RowType::kFloat32, RowType::kFloat16, RowType::kBFloat16}) {
    for (const int64_t hidden_size : {1, 3, 15, 16, 17, 63, 64, 65, 100, 2880, 7168}) {
      for (const size_t num_rows : {0, 1, 2, 4, 8, 32}) {
        std::vector<Row> rows(num_rows,
                              Row(static_cast<size_t>(hidden_size * row_type_bytes(type))));
        for (Row& row : rows) {
          for (uint8_t& byte : row) byte = static_cast<uint8_t>(random());
        }
        if (!check(type, hidden_size, rows)) return 1;
        std::vector<float> factors(num_rows);
        for (float& factor : factors) factor = static_cast<float>(random()) / 4e9f - 0.5f;
        if (!check_weighted(type, hidden_size, rows, factors)) return 1;
      }
    }
  }
  Row every_code(65536 * 2);
  for (uint32_t code = 0; code < 65536; ++code) {
    const auto bits = static_cast<uint16_t>(code);
    std::memcpy(every_code.data() + code * 2, &bits, 2);
  }
  for (const RowType type : {RowType::kFloat16, RowType::kBFloat16}) {
    if (!check(type, 65536, {every_code})) return 1;
  }
  std::puts("every element right");
  return 0;
}
