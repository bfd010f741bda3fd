// What the architecture has that a kernel is being compiled for. Only this file asks for it; below,
// what needs a newer one is left out, or done in another way.
#pragma once

namespace moe_ep {

#if defined(__CUDA_ARCH__)
inline constexpr int kArchitecture = __CUDA_ARCH__;  // 900 for compute capability 9.0
#else
inline constexpr int kArchitecture = 0;  // the host's part
#endif

// The first with kernels that start while the one before them runs.
inline constexpr int kProgrammaticLaunchArchitecture = 900;

// Bulk copies between shared and global memory, and barriers that count their bytes and let a warp
// sleep until they have come.
inline constexpr bool kHasBulkCopies = kArchitecture >= 900;
inline constexpr bool kHasProgrammaticLaunch = kArchitecture >= kProgrammaticLaunchArchitecture;
// Conversions from and to e4m3.
inline constexpr bool kConvertsFp8 = kArchitecture >= 890;

}  // namespace moe_ep
