// What the transports on CUDA share, by the names that it has here.
#pragma once

#include "cake/device/bit_columns.cuh"
#include "cake/device/memory_access.cuh"
#include "cake/device/row_sum.cuh"

namespace moe_ep::two_sided {

using cake::Chunk;
using cake::load_chunk;
using cake::load_unaligned;
using cake::start;
using cake::store_chunk;
using cake::transposed;

}  // namespace moe_ep::two_sided
