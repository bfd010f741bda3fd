// The ops begin_shared_batch and end_shared_batch of the one-sided backends, for CPU tensors: a
// round of ranks that hold the same tokens. Between them each rank fills its combine rows.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "core/limits.h"
#include "one_sided/cpu.h"
#include "one_sided/shared_batch.h"
#include "ops/errors.h"
#include "ops/missed_peers.h"
#include "ops/one_sided_backends.h"
#include "ops/parallel.h"
#include "ops/round_errors.h"
#include "ops/tensor_args.h"

namespace moe_ep::ops {
namespace {

int64_t room_for_tokens(const Geometry& g) {
  return static_cast<int64_t>(g.ep_size) * g.max_tokens_per_rank;
}

// The routing of a batch, for comparison.
struct Routing {
  int64_t hash;
  int64_t id_of_no_expert;  // the first one, negative if there is none
};

template <typename Id>
Routing routing_of(const Id* ids, int64_t count, int64_t num_experts) {
  uint64_t hash = static_cast<uint64_t>(count);
  int64_t id_of_no_expert = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] >= num_experts && id_of_no_expert < 0) id_of_no_expert = ids[i];
    // All padding is alike, and int32 like int64.
    hash = (hash ^ static_cast<uint64_t>(ids[i] < 0 ? -1 : int64_t{ids[i]})) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  return {static_cast<int64_t>(hash), id_of_no_expert};
}

// All ranks have the same wrong id: they end the round together. Raising before they had met would
// leave those waiting whose ids are others, and right.
[[noreturn]] void refuse(const one_sided::SharedBatch& p, int64_t id_of_no_expert) {
  const Outcome ended = one_sided::abandon(p.workspace, p.timeout_sec);
  if (ended == Outcome::kTimeout) raise_missed(rows_of(p.workspace));
  if (ended == Outcome::kInterrupted) raise_interrupt();
  fail("MoEEpInputError", "topk_ids must be below num_experts=", p.workspace.geometry.num_experts,
       ", or negative for padding, got ", id_of_no_expert, ". Nothing was computed");
}

void begin_shared_batch(Tensor workspace, Tensor topk_ids, std::vector<int64_t> geometry,
                        int64_t ep_rank, int64_t timeout_sec) {
  one_sided::SharedBatch p{};
  p.workspace = workspace_from(workspace, geometry_from(geometry), ep_rank);
  p.timeout_sec = checked_timeout(timeout_sec);
  const Geometry& g = p.workspace.geometry;
  check(g.ep_size <= kMaxTopK, "a batch is shared by at most ", kMaxTopK, " ranks, got ",
        g.ep_size);
  const TopkIds ids = topk_ids_from(topk_ids, workspace, g.top_k, room_for_tokens(g));
  p.num_tokens = ids.num_tokens;
  const int64_t count = static_cast<int64_t>(ids.num_tokens) * g.top_k;
  const Routing routing =
      ids.are_int64 ? routing_of(static_cast<const int64_t*>(ids.data), count, g.num_experts)
                    : routing_of(static_cast<const int32_t*>(ids.data), count, g.num_experts);
  p.routing = routing.hash;
  check_state(initialised_control(p.workspace).phase == Phase::kIdle,
              "begin_shared_batch was called in a round");
  std::vector<RoundHeader> headers(static_cast<size_t>(g.ep_size));
  switch (one_sided::begin_shared_batch(p, headers.data())) {
    case Outcome::kDone:
      if (routing.id_of_no_expert >= 0) refuse(p, routing.id_of_no_expert);
      break;
    case Outcome::kTimeout:
      raise_missed(rows_of(p.workspace));
    case Outcome::kInterrupted:
      raise_interrupt();
    case Outcome::kAbandoned:  // of the other op
    case Outcome::kDisagreement:
      raise_batch_disagreement(headers.data(), g.ep_size);
  }
}

Tensor end_shared_batch(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank,
                        int64_t num_tokens, int64_t hidden_size, ScalarType dtype,
                        int64_t timeout_sec) {
  one_sided::SharedBatch p{};
  p.workspace = workspace_from(workspace, geometry_from(geometry), ep_rank);
  p.timeout_sec = checked_timeout(timeout_sec);
  const Geometry& g = p.workspace.geometry;
  const RowType type = row_type_from(dtype);
  p.num_tokens = bounded("num_tokens", num_tokens, 0, room_for_tokens(g));
  const int64_t row_bytes = hidden_size * row_type_bytes(type);
  check(hidden_size >= 1 && row_bytes <= g.combine_bytes_per_token, "hidden_size=", hidden_size,
        " takes ", row_bytes, " bytes a row, and the workspace has room for 1 to ",
        g.combine_bytes_per_token);
  const ControlBlock& control = initialised_control(p.workspace);
  check_state(control.phase == Phase::kDispatch && control.num_tokens == p.num_tokens,
              "end_shared_batch must follow begin_shared_batch, with its num_tokens");
  Tensor sums = torch::stable::empty({num_tokens, hidden_size}, dtype);
  auto* out = static_cast<uint8_t*>(sums.mutable_data_ptr());
  switch (one_sided::end_shared_batch(p, hidden_size, type, out, torch_parallel_for())) {
    case Outcome::kDone:
      break;
    case Outcome::kTimeout:
      raise_missed(rows_of(p.workspace));
    case Outcome::kInterrupted:
      raise_interrupt();
    case Outcome::kAbandoned:
      raise_abandoned(one_sided::who_abandoned(p.workspace), g.ep_size);
    case Outcome::kDisagreement:
      raise_combine_disagreement("");
  }
  return sums;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) {
  implement_for_each(m, "begin_shared_batch", TORCH_BOX(&begin_shared_batch));
  implement_for_each(m, "end_shared_batch", TORCH_BOX(&end_shared_batch));
}

}  // namespace moe_ep::ops
