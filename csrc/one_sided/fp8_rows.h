// Expert rows that travel back as scaled FP8: how their owner quantises one, and how their source
// sums those of a token. Every backend and device gives the bits that this gives: start from +0.0
// in float32, add the numbers of the rows (core/scaled_fp8.h) in the order given, round once.
#pragma once

#include <cstdint>

#include "core/scaled_fp8.h"
#include "one_sided/params.h"
#include "transport/reduce_rows.h"

namespace moe_ep::one_sided {

// The rows of a low-precision combine that may be pulled as they are, and quantised by who sums
// them: of the type that experts give; others would take kernels of their own.
inline constexpr RowType kQuantizedByReader = RowType::kBFloat16;

// Whether they are, where the backend can. That moves more bytes, but over no link where all ranks
// share a GPU, and no row is stored and loaded once more on its way: rounds of 1 to 4096 tokens
// with two and four ranks on one H200 took 0.54 to 0.80 of the time. All ranks must find the same:
// so it follows from what they share.
constexpr bool reader_quantizes(const Geometry& g, int64_t hidden_size, RowType type) {
  return g.spans_gpus == 0 && type == kQuantizedByReader &&
         hidden_size <= g.combine_bytes_per_token / row_type_bytes(type);
}

inline bool travels_as_fp8(const CombineParams& p) {
  return p.low_precision && !p.reader_quantizes;
}

// Of a row in the workspace.
inline int64_t travelling_row_bytes(const CombineParams& p) {
  if (travels_as_fp8(p)) return Fp8Row::of(p.hidden_size).bytes;
  return p.hidden_size * row_type_bytes(p.row_type);
}

// From one such row to the next.
inline uint64_t travelling_row_pitch(const CombineParams& p) {
  if (travels_as_fp8(p)) return Fp8Row::of(p.hidden_size).pitch;
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
