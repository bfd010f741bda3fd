// From op arguments to the plain structs of the transports, with the checks that keep memory safe:
// what all ops on a workspace share.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/payload_placement.h"
#include "core/workspace_layout.h"
#include "one_sided/params.h"
#include "one_sided/segment.h"

namespace moe_ep::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// `fields`: the fields of Geometry in order. Raises on a value outside the limits.
Geometry geometry_from(const std::vector<int64_t>& fields);

// Of any transport: where a workspace lies, one row a rank.
struct WorkspaceRows {
  uint8_t* base;
  int64_t rank_stride;
  int32_t ep_rank;
  int64_t ep_size;
  int64_t segment_bytes;

  uint8_t* own_segment() const { return base + ep_rank * rank_stride; }
};
// Checks type and shape of `[ep_size, segment_bytes]`; not yet whether it was initialised.
WorkspaceRows workspace_rows(const Tensor& workspace, int64_t ep_size, int64_t segment_bytes,
                             int64_t ep_rank);
WorkspaceRows rows_of(const one_sided::WorkspaceView& workspace);
one_sided::WorkspaceView workspace_from(const Tensor& workspace, const Geometry& geometry,
                                        int64_t ep_rank);

// Raises unless the tensor is where the workspace is.
void check_device(const char* name, const Tensor& tensor, const Tensor& workspace);

// Raises unless `initialize` prepared this very memory for this geometry, and unless no wait on it
// ever timed out. A workspace of one rank may be a copy (tests of the ops make copies); with peers
// a copy is always a mistake, since they go on writing into the original.
// fingerprint: of the geometry that the call is for.
ControlBlock& initialised_control(const WorkspaceRows& workspace, uint64_t fingerprint);
ControlBlock& initialised_control(const one_sided::WorkspaceView& workspace);

// The same, of a control block that lies elsewhere; `self_address` is not looked at.
void check_initialised(const ControlBlock& control, uint64_t fingerprint);
[[noreturn]] void raise_not_initialised();
[[noreturn]] void raise_other_geometry();
[[noreturn]] void raise_copy();

struct ActiveRanks {
  RankMask fixed;
  const uint64_t* on_device;  // null: `fixed`. Else in device memory, and read at run time only
};

// mask: in host memory, or where the workspace is.
ActiveRanks active_ranks_from(const std::optional<Tensor>& mask, const Tensor& workspace,
                              const Geometry& geometry, int64_t ep_rank);
// "0, 2" for messages.
std::string ranks_in(const RankMask& mask, int64_t ep_size);

// Raises MoEEpConfigError unless low <= value <= high.
int32_t bounded(const char* name, int64_t value, int64_t low, int64_t high);
int32_t checked_timeout(int64_t timeout_sec);
int32_t checked_tokens_per_rank(int64_t tokens_per_rank, const Geometry& geometry);
int32_t checked_invalid_expert_id(int64_t invalid_expert_id);

// Where the payloads lie whose rows have these many bytes.
PayloadPlacement placement_from(const Geometry& geometry, int64_t tokens_per_rank,
                                const std::vector<int64_t>& row_bytes, int64_t index);

// Of rows of these many bytes. Raises unless they are elements of the dtype.
int64_t columns_of(int64_t row_bytes, ScalarType dtype);

// Whether the tensor has bytes in [begin, end).
bool overlaps(const Tensor& tensor, const uint8_t* begin, const uint8_t* end);

// For what a round reads or writes while peers write and read the workspace.
void check_outside_workspace(const char* name, const Tensor& tensor,
                             const WorkspaceRows& workspace);
void check_outside_workspace(const char* name, const Tensor& tensor,
                             const one_sided::WorkspaceView& workspace);
// Whether `rows` [n, columns] are the workspace's own combine rows, in place already. Raises where
// they only overlap them.
bool is_combine_input(const Tensor& rows, const one_sided::WorkspaceView& workspace);

// What ends the waits of this process early, or null.
InterruptCheck current_interrupt_check();
// address: of an InterruptCheck for all waits of this process; 0: none.
void set_interrupt_check(int64_t address);

}  // namespace moe_ep::ops
