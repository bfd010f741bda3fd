// A round of CPU ranks that hold the same tokens. None travels: each rank puts what its experts
// have made of all of them into its combine rows, row i for token i, and all sum what all have
// made.
#pragma once

#include <cstdint>

#include "one_sided/params.h"
#include "transport/outcome.h"
#include "transport/parallel_for.h"

namespace moe_ep::one_sided {

// As num_payloads of a round header: such a round. In place of the bytes of rows, row_bytes then
// says what must be the same on all ranks.
inline constexpr int16_t kSharedBatch = -1;
inline constexpr int32_t kBatchTokens = 0, kBatchRouting = 1;  // index of row_bytes

struct SharedBatch {
  WorkspaceView workspace;
  int32_t num_tokens;  // the combine rows have room for them
  int64_t routing;     // hash of the tokens' ids
  int32_t timeout_sec;
};

// When it has returned kDone, no peer reads the combine rows of the round before any more, and all
// ranks have this batch. out_headers: [ep_size], filled where they have not.
Outcome begin_shared_batch(const SharedBatch& batch, RoundHeader* out_headers);

// out: [num_tokens, hidden_size], dense. At most kMaxTopK ranks.
Outcome end_shared_batch(const SharedBatch& batch, int64_t hidden_size, RowType row_type,
                         uint8_t* out, const ParallelFor& parallel_for);

}  // namespace moe_ep::one_sided
