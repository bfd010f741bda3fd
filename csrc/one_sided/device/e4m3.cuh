// Four e4m3 codes in a word, the first in the lowest byte, from and to float32. The hardware that
// can rounds and saturates as core/float_formats.h does, which stands in for it elsewhere.
#pragma once

#include <cstdint>

#include "core/float_formats.h"
#include "core/rows.h"
#include "transport/device/architecture.cuh"
#include "transport/device/row_sum.cuh"

namespace moe_ep::one_sided {

// The same numbers as e4m3_to_float, and NaN for NaN.
__device__ inline void unpack_e4m3(uint32_t codes, float (&number)[4]) {
  if constexpr (kConvertsFp8) {
    uint32_t low, high;
    asm("{.reg .b16 l,h; mov.b32 {l,h},%2; cvt.rn.f16x2.e4m3x2 %0,l; cvt.rn.f16x2.e4m3x2 %1,h;}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
    Chunk<RowType::kFloat16>::unpack(low, number[0], number[1]);
    Chunk<RowType::kFloat16>::unpack(high, number[2], number[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) number[i] = e4m3_to_float(static_cast<uint8_t>(codes >> (8 * i)));
  }
}

__device__ inline uint32_t pack_e4m3(float a, float b, float c, float d) {
  if constexpr (kConvertsFp8) {
    uint32_t codes;
    asm("{.reg .b16 l,h; cvt.rn.satfinite.e4m3x2.f32 l,%2,%1; cvt.rn.satfinite.e4m3x2.f32 h,%4,%3;"
        " mov.b32 %0,{l,h};}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return codes;
  } else {
    return static_cast<uint32_t>(float_to_e4m3(a)) | static_cast<uint32_t>(float_to_e4m3(b)) << 8 |
           static_cast<uint32_t>(float_to_e4m3(c)) << 16 |
           static_cast<uint32_t>(float_to_e4m3(d)) << 24;
  }
}

}  // namespace moe_ep::one_sided
