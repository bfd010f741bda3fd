// Exact conversions between float32 and the narrow floating-point formats that rows travel in.
//
// Every encoder rounds to nearest, ties to even, and takes its decisions on bit patterns: no
// intrinsics, no table, no branch, so that compilers vectorise the loops around them and a GPU
// gives the same bits as a CPU. The few floating-point operations that subnormal codes need have
// operands made by integer operations, and normal results: a compiler cannot fuse them with the
// caller's arithmetic, and modes that flush subnormals do not change them.
//
//   format   bits            largest   smallest    beyond the largest   NaN
//   bf16     1.8.7           3.4e38    2^-133      infinity             0x7FC0
//   fp16     1.5.10          65504     2^-24       infinity             0x7E00
//   e4m3     1.4.3 ("fn")    448       2^-9        +-448 (saturates)    0x7F
//   e2m1     1.2.1           6         0.5         +-6 (saturates)      none: encodes as 0
//   ue8m0    0.8.0           2^127     2^-127      -                    0xFF
//
// A NaN of any sign and payload encodes as the one NaN of the table: payloads differ between
// processors, results must not.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace moe_ep {

MOE_EP_HOST_DEVICE constexpr uint32_t float_bits(float value) {
  return __builtin_bit_cast(uint32_t, value);
}

MOE_EP_HOST_DEVICE constexpr float float_from_bits(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

inline constexpr uint32_t kFloatMagnitudeMask = 0x7FFFFFFF;
inline constexpr uint32_t kFloatInfinityBits = 0x7F800000;  // magnitudes above it are NaN
inline constexpr uint32_t kFloat32Nan = 0x7FC00000;  // the one NaN of each format, see the table
inline constexpr uint16_t kFloat16Nan = 0x7E00;
inline constexpr uint16_t kBFloat16Nan = 0x7FC0;
inline constexpr int kFloatMantissaBits = 23;
inline constexpr int kFloatExponentBias = 127;

// `condition ? yes : no` on bit masks. With a plain conditional around floating-point work, GCC
// sinks that work into a branch and then, because it might trap, refuses to vectorise the loop.
MOE_EP_HOST_DEVICE constexpr uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

// Rounds the magnitude `bits` (sign cleared, a normal float) to its upper 32 - `kDropped` bits,
// ties to even, and shifts them down. A carry out of the mantissa enters the exponent, which is
// what rounding up to the next power of two means.
template <int kDropped>
MOE_EP_HOST_DEVICE constexpr uint32_t round_off_low_bits(uint32_t bits) {
  const uint32_t kept_is_odd = (bits >> kDropped) & 1;
  return (bits + (1u << (kDropped - 1)) - 1 + kept_is_odd) >> kDropped;
}

// Magnitude of a float32 -> code of a format with `kMantissaBits` and exponent bias `kBias`, for
// finite magnitudes; codes past the format's largest come out larger than its largest code, and the
// caller saturates.
template <int kMantissaBits, int kBias>
MOE_EP_HOST_DEVICE constexpr uint32_t round_magnitude(uint32_t magnitude) {
  constexpr int kDropped = kFloatMantissaBits - kMantissaBits;
  constexpr uint32_t kRebias = static_cast<uint32_t>(kFloatExponentBias - kBias);
  constexpr uint32_t kSmallestNormal = (kRebias + 1) << kFloatMantissaBits;
  const uint32_t normal = round_off_low_bits<kDropped>(magnitude) - (kRebias << kMantissaBits);

  // Subnormal results: one unit in the last place of `kAlign` is the format's smallest subnormal,
  // so that the addition itself does the rounding and leaves the code in the low bits of the sum.
  constexpr uint32_t kAlign = (kRebias + 1 + kDropped) << kFloatMantissaBits;
  const uint32_t small = select(magnitude < kSmallestNormal, magnitude, 0);
  const uint32_t subnormal = float_bits(float_from_bits(small) + float_from_bits(kAlign)) - kAlign;

  return select(magnitude < kSmallestNormal, subnormal, normal);
}

// ---- bf16

MOE_EP_HOST_DEVICE constexpr float bf16_to_float(uint16_t bits) {
  return float_from_bits(static_cast<uint32_t>(bits) << 16);
}

MOE_EP_HOST_DEVICE constexpr uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  const bool is_nan = (bits & kFloatMagnitudeMask) > kFloatInfinityBits;
  return static_cast<uint16_t>(select(is_nan, kBFloat16Nan, round_off_low_bits<16>(bits)));
}

// ---- fp16

MOE_EP_HOST_DEVICE constexpr float fp16_to_float(uint16_t bits) {
  constexpr uint32_t kRebias = (kFloatExponentBias - 15) << kFloatMantissaBits;
  constexpr float kSmallestSubnormal = 1.0f / (1 << 24);
  const uint32_t magnitude = bits & 0x7FFFu;
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t subnormal =
      float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * kSmallestSubnormal);
  const uint32_t normal = (magnitude << 13) + kRebias;
  const uint32_t finite = select(magnitude < 0x0400, subnormal, normal);
  const uint32_t infinity_or_nan = normal + kRebias;  // exponent all ones, payload kept
  return float_from_bits(sign | select(magnitude < 0x7C00, finite, infinity_or_nan));
}

MOE_EP_HOST_DEVICE constexpr uint16_t float_to_fp16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & kFloatMagnitudeMask;
  const uint32_t code = round_magnitude<10, 15>(magnitude);
  const uint32_t number = ((bits >> 16) & 0x8000) | select(code < 0x7C00, code, 0x7C00);
  return static_cast<uint16_t>(select(magnitude > kFloatInfinityBits, kFloat16Nan, number));
}

// ---- e4m3

MOE_EP_HOST_DEVICE constexpr float e4m3_to_float(uint8_t bits) {
  constexpr float kSmallestSubnormal = 1.0f / (1 << 9);
  const uint32_t magnitude = bits & 0x7Fu;
  const uint32_t sign = (bits & 0x80u) << 24;
  const uint32_t subnormal =
      float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * kSmallestSubnormal);
  const uint32_t normal = (magnitude << 20) + ((kFloatExponentBias - 7) << kFloatMantissaBits);
  const uint32_t number = select(magnitude < 0x08, subnormal, normal);
  return float_from_bits(sign | select(magnitude < 0x7F, number, kFloat32Nan));
}

MOE_EP_HOST_DEVICE constexpr uint8_t float_to_e4m3(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & kFloatMagnitudeMask;
  const uint32_t code = round_magnitude<3, 7>(magnitude);
  const uint32_t number = ((bits >> 24) & 0x80) | select(code < 0x7E, code, 0x7E);
  return static_cast<uint8_t>(select(magnitude > kFloatInfinityBits, 0x7F, number));
}

// ---- e2m1, one code in the low four bits

MOE_EP_HOST_DEVICE constexpr float e2m1_to_float(uint8_t code) {
  const uint32_t magnitude = code & 0x7u;
  const uint32_t sign = (code & 0x8u) << 28;
  const uint32_t normal = (magnitude << 22) + ((kFloatExponentBias - 1) << kFloatMantissaBits);
  const uint32_t subnormal = magnitude * 0x3F000000;  // 0 or 0.5
  return float_from_bits(sign | (magnitude < 2 ? subnormal : normal));
}

MOE_EP_HOST_DEVICE constexpr uint8_t float_to_e2m1(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & kFloatMagnitudeMask;
  const uint32_t code = round_magnitude<1, 1>(magnitude);
  const uint32_t number = ((bits >> 28) & 0x8) | select(code < 0x7, code, 0x7);
  return static_cast<uint8_t>(select(magnitude > kFloatInfinityBits, 0, number));
}

// ---- ue8m0: powers of two only, used as block scales

MOE_EP_HOST_DEVICE constexpr float ue8m0_to_float(uint8_t code) {
  constexpr uint32_t kSmallest = 0x00400000;  // 2^-127, a subnormal float
  const uint32_t power = static_cast<uint32_t>(code) << kFloatMantissaBits;
  return float_from_bits(code == 0xFF ? kFloat32Nan : code == 0 ? kSmallest : power);
}

}  // namespace moe_ep
