// Expert rows that travel back as scaled FP8: how their owner quantises one, and how their source
// sums those of a token. Every backend and device gives the bits that this gives: start from +0.0
// in float32, add the numbers of the rows (core/scaled_fp8.h) in the order given, round once.
#pragma once

#include <cstdint>

#include "core/scaled_fp8.h"
#include "one_sided/params.h"
#include "transport/reduce_rows.h"

namespace moe_ep::one_sided {

// Of a row in the workspace.
inline int64_t travelling_row_bytes(const CombineParams& p) {
  if (p.low_precision) return Fp8Row::of(p.hidden_size).bytes;
  return p.hidden_size * row_type_bytes(p.row_type);
}

// From one such row to the next.
inline uint64_t travelling_row_pitch(const CombineParams& p) {
  if (p.low_precision) return Fp8Row::of(p.hidden_size).pitch;
  return row_pitch(travelling_row_bytes(p));
}

// row: [hidden_size] elements of `type`; out: an Fp8Row.
void quantize_row_to_fp8(const uint8_t* row, int64_t hidden_size, RowType type, uint8_t* out);

// As reduce_rows, of rows that are Fp8Rows; out is of `type`.
void reduce_fp8_rows(const uint8_t* const* rows, int32_t num_rows, int64_t hidden_size,
                     RowType type, uint8_t* out);

// The same sum before the rounding.
void reduce_fp8_rows_to_float(const uint8_t* const* rows, int32_t num_rows, int64_t hidden_size,
                              float* out);

}  // namespace moe_ep::one_sided
