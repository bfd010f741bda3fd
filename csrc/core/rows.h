// How the rows of a call are described to the transports.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace moe_ep {

// Of the elements of an expert's output.
enum class RowType : int32_t { kFloat32, kFloat16, kBFloat16 };

MOE_EP_HOST_DEVICE constexpr int64_t row_type_bytes(RowType type) {
  return type == RowType::kFloat32 ? 4 : 2;
}

// A [num_rows, row_bytes] input whose rows lie `stride` bytes apart.
struct RowsIn {
  const uint8_t* data;
  int64_t row_bytes;
  int64_t stride;
};

}  // namespace moe_ep
