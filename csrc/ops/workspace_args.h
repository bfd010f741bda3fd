// From op arguments to the plain structs of the transports, with the checks that keep memory safe.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "cake/params.h"
#include "cake/segment.h"
#include "core/workspace_layout.h"

namespace moe_ep::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// `fields`: the fields of Geometry in order. Raises on a value outside the limits.
Geometry geometry_from(const std::vector<int64_t>& fields);

// Checks type and shape of `[ep_size, segment_bytes]`; not yet whether it was initialised.
cake::WorkspaceView workspace_from(const Tensor& workspace, const Geometry& geometry,
                                   int64_t ep_rank);

// Raises unless `initialize` prepared this very memory for this geometry, and unless no wait on it
// ever timed out. A workspace of one rank may be a copy (tests of the ops make copies); with peers
// a copy is always a mistake, since they go on writing into the original.
ControlBlock& initialised_control(const cake::WorkspaceView& workspace);

RankMask active_ranks_from(const std::optional<Tensor>& mask, const Geometry& geometry,
                           int64_t ep_rank);

int32_t checked_timeout(int64_t timeout_sec);
int32_t checked_tokens_per_rank(int64_t tokens_per_rank, const Geometry& geometry);

// Raises MoEEpInputError and forgets the record, if the round in flight had invalid ids.
void raise_invalid_ids(ControlBlock& control, const cake::WorkspaceView& workspace);
[[noreturn]] void raise_timeout(const ControlBlock& control, const cake::WorkspaceView& workspace);
[[noreturn]] void raise_interrupt();

// address: of an InterruptCheck for all waits of this process; 0: none.
void set_interrupt_check(int64_t address);

// For what a round reads or writes while peers write and read the workspace.
void check_outside_workspace(const char* name, const Tensor& tensor,
                             const cake::WorkspaceView& workspace);
// Whether `rows` [n, columns] are the workspace's own combine rows, in place already. Raises where
// they only overlap them.
bool is_combine_input(const Tensor& rows, const cake::WorkspaceView& workspace);

}  // namespace moe_ep::ops
