// The limits of the library. Each stands here once, for host, device and Python.
#pragma once

#include <cstdint>

namespace moe_ep {

inline constexpr int32_t kMaxEpSize = 256;
inline constexpr int32_t kMaxTopK = 32;
inline constexpr int32_t kMaxPayloads = 4;        // row tensors one dispatch can carry
inline constexpr int32_t kMaxTimeoutSec = 86400;  // a day
// What one dispatch adds to each peer's arrival word, shared out among its CTAs: no grid has more.
inline constexpr uint32_t kArrivalsPerRound = 65536;
// Tokens of a rank that can travel as packets: lane t of a warp stands for token t.
inline constexpr int32_t kMaxPacketTokens = 32;
// Tokens a rank of which combine may push the rows as packets, unless a geometry prefers packets.
inline constexpr int32_t kMaxPushTokens = 8;
// Of a row that is pushed: what is within a slot is counted in 32 bits.
inline constexpr int64_t kMaxPushedRowBytes = 1 << 20;
// Of a row that is pushed in bulk: parts that have a flag of their own each.
inline constexpr uint32_t kMaxRowParts = 4;
// Of one rank. Far above any machine, far below where sums of offsets leave 64 bits.
inline constexpr int64_t kMaxSegmentBytes = int64_t{1} << 46;

// Payload regions start on this boundary: the widest access used on them (a 128-byte cache line).
inline constexpr uint64_t kRegionAlignment = 128;
// Rows in the workspace start on this boundary, the widest access of a thread and the unit of the
// bulk-copy engine: rows of another width lie further apart than they are wide.
inline constexpr uint64_t kRowAlignment = 16;
// Flags of different peers never share a line, so that a store to one does not delay a poll of
// another.
inline constexpr uint64_t kFlagAlignment = 64;

}  // namespace moe_ep
