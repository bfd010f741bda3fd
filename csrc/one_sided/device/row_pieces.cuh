// Rows of tokens, cut into pieces that a warp moves at once, through registers: no copy engine.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/fast_divide.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/routing.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

// How the rows of a token are cut. A piece is of one payload.
struct PieceShape {
  int32_t row_chunks[kMaxPayloads];  // 16 bytes each; 0 behind the last payload
  int32_t pieces_end[kMaxPayloads];  // of a token: behind payload i; all of them behind the last
  int32_t pieces;                    // of a token, at least 1
  FastDivider by_pieces;

  // The payload of a token's first piece.
  int32_t first_payload() const {
    int32_t i = 0;
    while (i < kMaxPayloads - 1 && pieces_end[i] == 0) ++i;
    return i;
  }
  static PieceShape of(const DispatchKernelParams& p, int32_t piece_chunks) {
    PieceShape shape{{}, {}, 0, FastDivider(1)};
    for (int32_t i = 0; i < kMaxPayloads; ++i) {
      int32_t& chunks = shape.row_chunks[i];
      if (i < p.num_payloads) chunks = p.chunks_end[i] - (i == 0 ? 0 : p.chunks_end[i - 1]);
      shape.pieces += chunks / piece_chunks + (chunks % piece_chunks != 0);
      shape.pieces_end[i] = shape.pieces;
    }
    shape.pieces = std::max(shape.pieces, 1);
    shape.by_pieces = FastDivider(shape.pieces);
    return shape;
  }
};

// Part of a row of one payload, on its way. kChunksPerLane: what a lane has of a whole piece.
// kAligned: rows start on 16 bytes and are of whole 16 bytes.
template <int kChunksPerLane, bool kAligned>
struct RowPiece {
  static constexpr int32_t kChunks = kChunksPerLane * kWarpSize;

  int32_t token;  // negative: there is none
  int32_t payload;
  int32_t chunk;  // of the row: this lane's first; the others follow kWarpSize apart
  uint4 chunks[kChunksPerLane];

  __device__ static RowPiece none() {
    RowPiece piece{};
    piece.token = -1;
    return piece;
  }
  // Does not look at what it loads, where rows are aligned.
  __device__ static RowPiece load(const DispatchKernelParams& p, const PieceShape& shape,
                                  int32_t index) {
    RowPiece piece = none();
    if (index >= p.num_tokens * shape.pieces) return piece;
    piece.token = shape.by_pieces.divide(index);
    int32_t in_payload = index - piece.token * shape.pieces;
    const int32_t in_token = in_payload;
#pragma unroll
    for (int32_t i = 0; i < kMaxPayloads - 1; ++i) {
      if (in_token < shape.pieces_end[i]) continue;
      piece.payload = i + 1;
      in_payload = in_token - shape.pieces_end[i];
    }
    piece.chunk = in_payload * kChunks + lane_id();
    const RowsIn& rows = p.payloads[piece.payload];
    const auto* const from =
        reinterpret_cast<const uint4*>(rows.data + piece.token * rows.stride) + piece.chunk;
#pragma unroll
    for (int i = 0; i < kChunksPerLane; ++i) {
      if (piece.chunk + i * kWarpSize < shape.row_chunks[piece.payload]) {
        if constexpr (kAligned) {
          piece.chunks[i] = load_chunk(from + i * kWarpSize);
        } else {
          const int64_t byte = int64_t{16} * (piece.chunk + i * kWarpSize);
          const auto bytes = static_cast<int32_t>(min(rows.row_bytes - byte, int64_t{16}));
          piece.chunks[i] = load_unaligned(from + i * kWarpSize, bytes);
        }
      }
    }
    return piece;
  }

  // Up to the row's pitch: behind a row's end are zeros.
  __device__ void store(const PieceShape& shape, uint8_t* row) const {
    uint4* const to = reinterpret_cast<uint4*>(row) + chunk;
#pragma unroll
    for (int i = 0; i < kChunksPerLane; ++i) {
      if (chunk + i * kWarpSize < shape.row_chunks[payload]) {
        store_chunk(to + i * kWarpSize, chunks[i]);
      }
    }
  }
};

}  // namespace moe_ep::one_sided
