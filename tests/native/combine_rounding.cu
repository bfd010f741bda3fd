// The combine kernels unpack and round by hardware instructions, the CPU by the integer operations
// of core/float_formats.h. As a program on a GPU this compares the two: every float32 as a sum to
// round, every 16-bit pattern as a row to add, and sums of rows of random bits; and of rows that
// travel as FP8 every float32 to pack, every code to unpack, and the scale of every largest number.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "core/float_formats.h"
#include "core/scaled_fp8.h"
#include "one_sided/device/fp8_chunk.cuh"
#include "one_sided/device/fp8_sums.cuh"
#include "transport/device/row_sum.cuh"

namespace moe_ep::one_sided {
namespace {

constexpr int kMaxRows = 6;
constexpr uint64_t kNoFault = ~uint64_t{0};

// A row type as the CPU sees it. Floats are float32 bits.
template <RowType kType>
struct Reference;
template <>
struct Reference<RowType::kFloat32> {
  static constexpr const char* kName = "float32";
  MOE_EP_HOST_DEVICE static float load(uint32_t bits) { return float_from_bits(bits); }
  MOE_EP_HOST_DEVICE static uint32_t round(float sum) {
    const bool is_nan = (float_bits(sum) & kFloatMagnitudeMask) > kFloatInfinityBits;
    return is_nan ? kFloat32Nan : float_bits(sum);
  }
};
template <>
struct Reference<RowType::kFloat16> {
  static constexpr const char* kName = "float16";
  MOE_EP_HOST_DEVICE static float load(uint16_t bits) { return fp16_to_float(bits); }
  MOE_EP_HOST_DEVICE static uint16_t round(float sum) { return float_to_fp16(sum); }
};
template <>
struct Reference<RowType::kBFloat16> {
  static constexpr const char* kName = "bfloat16";
  MOE_EP_HOST_DEVICE static float load(uint16_t bits) { return bf16_to_float(bits); }
  MOE_EP_HOST_DEVICE static uint16_t round(float sum) { return float_to_bf16(sum); }
};

template <RowType kType>
using Element = typename Chunk<kType>::Element;
template <RowType kType>
inline constexpr int kElements = Chunk<kType>::kElements;

// fault: the smallest float32 that is rounded differently, or kNoFault.
template <RowType kType>
__global__ void round_all_floats(unsigned long long* fault) {
  constexpr uint64_t kChunks = (uint64_t{1} << 32) / kElements<kType>;
  const uint64_t threads = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t c = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; c < kChunks;
       c += threads) {
    float sum[kElements<kType>];
    for (int i = 0; i < kElements<kType>; ++i) {
      sum[i] = float_from_bits(static_cast<uint32_t>(c * kElements<kType> + i));
    }
    const uint4 rounded = Chunk<kType>::round(sum);
    Element<kType> out[kElements<kType>];
    memcpy(out, &rounded, sizeof(rounded));
    for (int i = 0; i < kElements<kType>; ++i) {
      if (out[i] != Reference<kType>::round(sum[i])) {
        atomicMin(fault, static_cast<unsigned long long>(c * kElements<kType> + i));
      }
    }
  }
}

// fault: the smallest float32 that is packed differently.
__global__ void pack_all_floats(unsigned long long* fault) {
  const uint64_t threads = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t first = 4 * (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x);
       first < uint64_t{1} << 32; first += 4 * threads) {
    float number[4];
    uint32_t wanted = 0;
    for (uint32_t i = 0; i < 4; ++i) {
      number[i] = float_from_bits(static_cast<uint32_t>(first) + i);
      wanted |= static_cast<uint32_t>(float_to_e4m3(number[i])) << (8 * i);
    }
    const uint32_t got = pack_e4m3(number[0], number[1], number[2], number[3]);
    // No NaN is packed: their codes need not be the same.
    for (uint32_t i = 0; i < 4; ++i) {
      const bool is_number = number[i] == number[i];
      if (is_number && (got ^ wanted) >> (8 * i) & 0xFF) {
        atomicMin(fault, static_cast<unsigned long long>(first + i));
      }
    }
  }
}

// fault: the smallest code that is unpacked differently.
__global__ void unpack_all_codes(unsigned long long* fault) {
  const uint32_t code = threadIdx.x;
  float number[4];
  unpack_e4m3(code | code << 8 | code << 16 | code << 24, number);
  const float wanted = e4m3_to_float(static_cast<uint8_t>(code));
  for (const float got : number) {
    const bool same = wanted != wanted ? got != got : float_bits(got) == float_bits(wanted);
    if (!same) atomicMin(fault, static_cast<unsigned long long>(code));
  }
}

// What a block gets, in one word.
MOE_EP_HOST_DEVICE uint32_t mixed(const Fp8Scale& scale) {
  return float_bits(scale.scale) * 31 + float_bits(scale.multiplier) + scale.keep;
}

__global__ void scales_of_blocks(uint32_t step, uint32_t count, uint32_t* out) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = mixed(fp8_scale_by_hardware(i * step));
}

// Case c sums its first num_rows[c] rows; -1: the sum must not be formed. kBegins: the first row is
// not added but begins the sum.
template <RowType kType, bool kBegins>
__global__ void sum_rows(const uint4* rows, const int* num_rows, int cases, uint4* out) {
  const int c = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (c >= cases) return;
  float sum[kElements<kType>];
  start(sum, num_rows[c] >= 0);
  for (int j = 0; j < num_rows[c]; ++j) {
    const uint4 chunk = rows[c * kMaxRows + j];
    if (kBegins && j == 0) {
      Chunk<kType>::begin(sum, chunk);
    } else {
      Chunk<kType>::add(sum, chunk);
    }
  }
  out[c] = Chunk<kType>::round(sum);
}

bool succeeded(cudaError_t error) {
  if (error != cudaSuccess) std::printf("%s\n", cudaGetErrorString(error));
  return error == cudaSuccess;
}

// what: what becomes of a fault, in words.
bool finds_no_fault(void (*kernel)(unsigned long long*), int ctas, const char* type,
                    const char* what) {
  unsigned long long* fault = nullptr;
  unsigned long long first = kNoFault;
  if (!succeeded(cudaMalloc(&fault, sizeof(first)))) return false;
  if (!succeeded(cudaMemcpy(fault, &first, sizeof(first), cudaMemcpyHostToDevice))) return false;
  kernel<<<static_cast<unsigned>(ctas), 256>>>(fault);
  if (!succeeded(cudaGetLastError())) return false;
  if (!succeeded(cudaMemcpy(&first, fault, sizeof(first), cudaMemcpyDeviceToHost))) return false;
  cudaFree(fault);
  if (first == kNoFault) return true;
  std::printf("%s: %08llx is %s differently\n", type, first, what);
  return false;
}

bool check_fp8_scales() {
  constexpr uint32_t kStep = 1021;  // a prime
  constexpr uint32_t kCount = 0x80000000u / kStep;
  uint32_t* scales = nullptr;
  if (!succeeded(cudaMalloc(&scales, kCount * sizeof(uint32_t)))) return false;
  scales_of_blocks<<<(kCount + 255) / 256, 256>>>(kStep, kCount, scales);
  if (!succeeded(cudaGetLastError())) return false;
  std::vector<uint32_t> got(kCount);
  if (!succeeded(
          cudaMemcpy(got.data(), scales, kCount * sizeof(uint32_t), cudaMemcpyDeviceToHost))) {
    return false;
  }
  cudaFree(scales);
  for (uint32_t i = 0; i < kCount; ++i) {
    if (got[i] == mixed(fp8_scale_of_block(i * kStep))) continue;
    std::printf("fp8: the scale for %08x differs\n", i * kStep);
    return false;
  }
  return true;
}

bool check_fp8() {
  return finds_no_fault(pack_all_floats, 1024, "e4m3", "packed") &&
         finds_no_fault(unpack_all_codes, 1, "e4m3", "unpacked") && check_fp8_scales();
}

struct Cases {
  std::vector<uint4> rows;  // [cases, kMaxRows]
  std::vector<int> num_rows;
};

// First every 16-bit pattern as a row of its own, then random bits; one in four elements of those
// has an extreme exponent: infinities, NaNs, zeros and subnormals.
template <RowType kType>
Cases make_cases() {
  constexpr int kPatterns = 65536 / kElements<kType>;
  constexpr int kRandom = 100'000;
  Cases cases{std::vector<uint4>((kPatterns + kRandom) * kMaxRows),
              std::vector<int>(kPatterns + kRandom, 1)};
  uint64_t state = 1;
  const auto next = [&state] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 32);
  };
  constexpr uint32_t kExponent = kType == RowType::kFloat16    ? 0x7C00
                                 : kType == RowType::kBFloat16 ? 0x7F80
                                                               : 0x7F800000;
  for (size_t c = 0; c < cases.num_rows.size(); ++c) {
    const bool is_pattern = c < static_cast<size_t>(kPatterns);
    if (!is_pattern) cases.num_rows[c] = static_cast<int>(next() % (kMaxRows + 2)) - 1;
    for (int j = 0; j < kMaxRows; ++j) {
      Element<kType> elements[kElements<kType>];
      for (int i = 0; i < kElements<kType>; ++i) {
        uint32_t bits = next();
        const uint32_t kind = next() % 8;
        if (kind == 0) bits |= kExponent;
        if (kind == 1) bits &= ~kExponent;
        if (is_pattern) bits = static_cast<uint32_t>(c * kElements<kType> + i);
        if (is_pattern && kType == RowType::kFloat32) bits *= 65537;
        elements[i] = static_cast<Element<kType>>(bits);
      }
      std::memcpy(&cases.rows[c * kMaxRows + j], elements, sizeof(elements));
    }
  }
  return cases;
}

template <RowType kType>
bool same_sums(const Cases& cases, const std::vector<uint4>& out) {
  for (size_t c = 0; c < out.size(); ++c) {
    Element<kType> got[kElements<kType>];
    std::memcpy(got, &out[c], sizeof(got));
    for (int i = 0; i < kElements<kType>; ++i) {
      float sum = cases.num_rows[c] < 0 ? float_from_bits(kFloat32Nan) : 0.0f;
      for (int j = 0; j < cases.num_rows[c]; ++j) {
        Element<kType> row[kElements<kType>];
        std::memcpy(row, &cases.rows[c * kMaxRows + j], sizeof(row));
        sum += Reference<kType>::load(row[i]);
      }
      const auto wanted = Reference<kType>::round(sum);
      if (got[i] != wanted) {
        std::printf("%s: case %zu, element %d: wanted %08x, got %08x\n", Reference<kType>::kName, c,
                    i, static_cast<uint32_t>(wanted), static_cast<uint32_t>(got[i]));
        return false;
      }
    }
  }
  return true;
}

template <RowType kType, bool kBegins>
bool check_sums() {
  const Cases cases = make_cases<kType>();
  const size_t count = cases.num_rows.size();
  uint4* rows = nullptr;
  uint4* sums = nullptr;
  int* num_rows = nullptr;
  if (!succeeded(cudaMalloc(&rows, cases.rows.size() * sizeof(uint4))) ||
      !succeeded(cudaMalloc(&sums, count * sizeof(uint4))) ||
      !succeeded(cudaMalloc(&num_rows, count * sizeof(int)))) {
    return false;
  }
  cudaMemcpy(rows, cases.rows.data(), cases.rows.size() * sizeof(uint4), cudaMemcpyHostToDevice);
  cudaMemcpy(num_rows, cases.num_rows.data(), count * sizeof(int), cudaMemcpyHostToDevice);
  const auto ctas = static_cast<unsigned>((count + 255) / 256);
  sum_rows<kType, kBegins><<<ctas, 256>>>(rows, num_rows, static_cast<int>(count), sums);
  if (!succeeded(cudaGetLastError())) return false;
  std::vector<uint4> out(count);
  if (!succeeded(cudaMemcpy(out.data(), sums, count * sizeof(uint4), cudaMemcpyDeviceToHost))) {
    return false;
  }
  cudaFree(rows);
  cudaFree(sums);
  cudaFree(num_rows);
  return same_sums<kType>(cases, out);
}

template <RowType kType>
bool check() {
  const char* const name = Reference<kType>::kName;
  return finds_no_fault(round_all_floats<kType>, 1024, name, "rounded") &&
         check_sums<kType, false>() && check_sums<kType, true>();
}

}  // namespace
}  // namespace moe_ep::one_sided

int main() {
  using moe_ep::RowType;
  using namespace moe_ep::one_sided;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU\n");
    return 77;  // skipped
  }
  const bool same = check<RowType::kFloat32>() && check<RowType::kFloat16>() &&
                    check<RowType::kBFloat16>() && check_fp8();
  if (same) std::printf("sums have the bits of the CPU\n");
  return same ? 0 : 1;
}
