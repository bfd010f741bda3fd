// Where the chunks of a token's record lie, on both sides of a dispatch: payloads, then ids, then
// weights. How they become packets is in packets.cuh.
#pragma once

#include <cstdint>

#include "core/workspace_layout.h"
#include "one_sided/cuda_params.h"

namespace moe_ep::one_sided {

// Rows of one part of a record, on one side of the exchange. Chunk c of the record, if it is of
// this part, is at origin + row * stride + 16 * c.
struct PartRows {
  uint64_t origin;
  int64_t stride;
  bool are_whole;  // chunks start on 16 bytes, and are all there
};

// A payload, the ids or the weights.
struct RecordPart {
  PartRows inputs;    // of this rank, by token
  PartRows outputs;   // what it has received, by row
  int64_t row_bytes;  // without the padding of the last chunk
  int32_t begin;      // the first chunk
};

struct RecordParts {
  static constexpr int32_t kMaxParts = kMaxPayloads + 2;

  RecordPart parts[kMaxParts];
  int32_t num_parts;
  int32_t ids_begin;  // chunks
  int32_t ids_end;
  int32_t end;
  bool are_whole;  // all parts on both sides

  static RecordParts of(const DispatchKernelParams& p) {
    const DeviceWorkspace& w = p.workspace;
    const uint8_t* const segment = w.base + w.ep_rank * w.rank_stride;
    RecordParts record{};
    record.are_whole = true;
    for (int32_t i = 0; i < p.num_payloads; ++i) {
      const RowsIn& rows = p.payloads[i];
      // In the workspace the pitch has room for whole chunks.
      record.add({address(rows.data), rows.stride, p.payload_is_aligned[i]},
                 {address(segment + p.placement.offset[i]),
                  static_cast<int64_t>(p.placement.pitch[i]), true},
                 rows.row_bytes);
    }
    const int64_t row_bytes = w.top_k * static_cast<int64_t>(sizeof(int32_t));
    const auto dense = [&](const void* rows) {
      return PartRows{address(rows), row_bytes,
                      (address(rows) | static_cast<uint64_t>(row_bytes)) % kRowAlignment == 0};
    };
    record.ids_begin = record.end;
    PartRows ids = dense(p.topk_ids);  // not read by chunks: see load_ids and IdBlock
    record.add(ids, dense(p.out_topk_ids), row_bytes);
    record.ids_end = record.end;
    if (p.has_weights) record.add(dense(p.topk_weights), dense(p.out_topk_weights), row_bytes);
    return record;
  }

 private:
  static uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }
  void add(PartRows inputs, PartRows outputs, int64_t row_bytes) {
    const uint64_t before = static_cast<uint64_t>(end) * kRowAlignment;
    inputs.origin -= before;
    outputs.origin -= before;
    are_whole &= inputs.are_whole && outputs.are_whole;
    parts[num_parts++] = {inputs, outputs, row_bytes, end};
    end += static_cast<int32_t>(row_pitch(row_bytes) / kRowAlignment);
  }
};

}  // namespace moe_ep::one_sided
