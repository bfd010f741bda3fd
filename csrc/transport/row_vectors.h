// Rows of the three element types as compiler vectors, and how functions on them are compiled
// for the machine they run on. For the sources that loop over rows.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/float_formats.h"

// Compiles a function for wider vectors as well and picks at load time: a wheel is built for the
// baseline of its architecture and must still use the machine it runs on.
// GCC 11 does not know x86-64-v4 here; Clang takes no clones of functions in an unnamed namespace.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#if __GNUC__ >= 12
#define MOE_EP_SIMD_CLONES [[gnu::target_clones("default", "avx2", "arch=x86-64-v4")]]
#else
#define MOE_EP_SIMD_CLONES [[gnu::target_clones("default", "avx2")]]
#endif
#else
#define MOE_EP_SIMD_CLONES
#endif

namespace moe_ep {

// Compiler vectors, because a plain loop over an array of accumulators was 2 to 5 times slower (GCC
// keeps the array in memory). No intrinsics: the same lines are right on every architecture.
constexpr int64_t kLanes = 16;
using Floats [[gnu::vector_size(kLanes * sizeof(float))]] = float;
using Words [[gnu::vector_size(kLanes * sizeof(uint32_t))]] = uint32_t;
using Halves [[gnu::vector_size(kLanes * sizeof(uint16_t))]] = uint16_t;

struct Float32Rows {
  using Element = float;
  [[gnu::always_inline]] static inline Floats load(const uint8_t* at) {
    Floats values;
    std::memcpy(&values, at, sizeof(values));
    return values;
  }
  // All NaNs leave as one, here too: payloads and signs of NaN sums differ between processors.
  [[gnu::always_inline]] static inline void store(Floats sum, uint8_t* at) {
    const Words bits = sum != sum ? Words{} + kFloat32Nan : __builtin_bit_cast(Words, sum);
    std::memcpy(at, &bits, sizeof(bits));
  }
};

struct BFloat16Rows {
  using Element = uint16_t;
  [[gnu::always_inline]] static inline Floats load(const uint8_t* at) {
    Halves bits;
    std::memcpy(&bits, at, sizeof(bits));
    return __builtin_bit_cast(Floats, __builtin_convertvector(bits, Words) << 16);
  }
  // float_to_bf16 of core/float_formats.h, lane by lane.
  [[gnu::always_inline]] static inline void store(Floats sum, uint8_t* at) {
    const Words bits = __builtin_bit_cast(Words, sum);
    const Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const Halves out =
        __builtin_convertvector(sum != sum ? Words{} + kBFloat16Nan : rounded, Halves);
    std::memcpy(at, &out, sizeof(out));
  }
};

struct Float16Rows {
  using Element = uint16_t;
  // fp16_to_float and float_to_fp16 of core/float_formats.h, lane by lane.
  [[gnu::always_inline]] static inline Floats load(const uint8_t* at) {
    constexpr uint32_t kRebias = (kFloatExponentBias - 15) << kFloatMantissaBits;
    Halves packed;
    std::memcpy(&packed, at, sizeof(packed));
    const Words bits = __builtin_convertvector(packed, Words);
    const Words magnitude = bits & 0x7FFF;
    const Floats small = __builtin_convertvector(magnitude, Floats) * (1.0f / (1 << 24));
    const Words normal = (magnitude << 13) + kRebias;
    const Words finite = magnitude < 0x0400 ? __builtin_bit_cast(Words, small) : normal;
    const Words number = magnitude < 0x7C00 ? finite : normal + kRebias;
    return __builtin_bit_cast(Floats, ((bits & 0x8000) << 16) | number);
  }
  [[gnu::always_inline]] static inline void store(Floats sum, uint8_t* at) {
    constexpr int kDropped = kFloatMantissaBits - 10;
    constexpr uint32_t kRebias = kFloatExponentBias - 15;
    constexpr uint32_t kSmallestNormal = (kRebias + 1) << kFloatMantissaBits;
    constexpr uint32_t kAlign = (kRebias + 1 + kDropped) << kFloatMantissaBits;
    const Words bits = __builtin_bit_cast(Words, sum);
    const Words magnitude = bits & kFloatMagnitudeMask;
    const Words rounded =
        (magnitude + ((1 << (kDropped - 1)) - 1) + ((magnitude >> kDropped) & 1)) >> kDropped;
    const Words small = magnitude < kSmallestNormal ? magnitude : Words{};
    const Floats aligned = __builtin_bit_cast(Floats, small) + float_from_bits(kAlign);
    const Words subnormal = __builtin_bit_cast(Words, aligned) - kAlign;
    const Words code = magnitude < kSmallestNormal ? subnormal : rounded - (kRebias << 10);
    const Words finite = code < 0x7C00 ? code : Words{} + 0x7C00;
    const Words number = sum != sum ? Words{} + kFloat16Nan : ((bits >> 16) & 0x8000) | finite;
    const Halves out = __builtin_convertvector(number, Halves);
    std::memcpy(at, &out, sizeof(out));
  }
};

}  // namespace moe_ep
