// What tests/unit/test_quantization.py calls through ctypes: the conversions and the quantiser of
// csrc/core over arrays.
#include "core/quantize_row.h"
#include "core/scaled_fp8.h"

using namespace moe_ep;

namespace {

template <auto kConvert, typename In, typename Out>
void convert(const In* in, int64_t count, Out* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = kConvert(in[i]);
}

}  // namespace

extern "C" {

void bf16_to_floats(const uint16_t* in, int64_t count, float* out) {
  convert<bf16_to_float>(in, count, out);
}
void fp16_to_floats(const uint16_t* in, int64_t count, float* out) {
  convert<fp16_to_float>(in, count, out);
}
void e4m3_to_floats(const uint8_t* in, int64_t count, float* out) {
  convert<e4m3_to_float>(in, count, out);
}
void e2m1_to_floats(const uint8_t* in, int64_t count, float* out) {
  convert<e2m1_to_float>(in, count, out);
}
void ue8m0_to_floats(const uint8_t* in, int64_t count, float* out) {
  convert<ue8m0_to_float>(in, count, out);
}

void floats_to_bf16(const float* in, int64_t count, uint16_t* out) {
  convert<float_to_bf16>(in, count, out);
}
void floats_to_fp16(const float* in, int64_t count, uint16_t* out) {
  convert<float_to_fp16>(in, count, out);
}
void floats_to_e4m3(const float* in, int64_t count, uint8_t* out) {
  convert<float_to_e4m3>(in, count, out);
}
void floats_to_e2m1(const float* in, int64_t count, uint8_t* out) {
  convert<float_to_e2m1>(in, count, out);
}

void quantize(const float* rows, int64_t num_rows, int64_t hidden_size, int32_t format,
              int32_t layout, float scalar_scale, uint8_t* values, uint8_t* scales) {
  const QuantizedRows out{static_cast<QuantFormat>(format),
                          static_cast<ScaleLayout>(layout),
                          scalar_scale,
                          num_rows,
                          hidden_size,
                          values,
                          scales};
  for (int64_t row = 0; row < num_rows; ++row) quantize_row(out, row, rows + row * hidden_size);
  clear_padding_rows(out);
}

// num_rows rows of one block each.
void quantize_fp8_blocks(const float* rows, int64_t num_rows, uint8_t* values, float* scales) {
  for (int64_t row = 0; row < num_rows; ++row) {
    scales[row] = quantize_fp8_block(rows + row * kFp8Block, values + row * kFp8Block);
  }
}

int64_t scale_bytes_of(int32_t layout, int64_t num_rows, int64_t num_blocks) {
  return scale_bytes(static_cast<ScaleLayout>(layout), num_rows, num_blocks);
}

int64_t scale_offset_of(int32_t layout, int64_t row, int64_t block, int64_t num_blocks) {
  return scale_row(static_cast<ScaleLayout>(layout), row, num_blocks).offset_of(block);
}

}  // extern "C"
