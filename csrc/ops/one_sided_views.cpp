// Views of what a dispatch has left in a one-sided workspace, as tensors with its storage. They are
// valid until combine; whether a round is open is up to the caller.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>

#include "ops/errors.h"
#include "ops/workspace_args.h"

namespace moe_ep::ops {
namespace {

template <size_t kArguments>
Tensor call(const char* op, const char* overload, std::array<StableIValue, kArguments> stack) {
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// [height, width] from byte `start` of the own segment on, rows `pitch` bytes apart.
Tensor view_of(const Tensor& workspace, const one_sided::WorkspaceView& view, uint64_t start,
               int64_t height, int64_t width, int64_t pitch, ScalarType dtype) {
  using torch::stable::detail::from;
  const Tensor elements = call<2>("aten::view", "dtype", {from(workspace), from(dtype)});
  const auto element = static_cast<int64_t>(elements.element_size());
  const int64_t first = elements.storage_offset() + view.ep_rank * elements.stride(0) +
                        static_cast<int64_t>(start) / element;
  const std::array<int64_t, 2> sizes{height, width};
  const std::array<int64_t, 2> strides{pitch / element, 1};
  return call<4>("aten::as_strided", "",
                 {from(elements), from(torch::headeronly::IntHeaderOnlyArrayRef(sizes)),
                  from(torch::headeronly::IntHeaderOnlyArrayRef(strides)),
                  from(std::optional<int64_t>(first))});
}

Tensor received_rows_view(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank,
                          int64_t tokens_per_rank, std::vector<int64_t> row_bytes, int64_t index,
                          ScalarType dtype) {
  const one_sided::WorkspaceView view = workspace_from(workspace, geometry_from(geometry), ep_rank);
  const PayloadPlacement placement =
      placement_from(view.geometry, tokens_per_rank, row_bytes, index);
  return view_of(workspace, view, placement.offset[index], view.geometry.ep_size * tokens_per_rank,
                 columns_of(row_bytes[index], dtype), static_cast<int64_t>(placement.pitch[index]),
                 dtype);
}

Tensor received_routing_view(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank,
                             int64_t tokens_per_rank, int64_t index) {
  const one_sided::WorkspaceView view = workspace_from(workspace, geometry_from(geometry), ep_rank);
  const Geometry& g = view.geometry;
  const WorkspaceLayout layout = WorkspaceLayout::of(g);
  const int64_t rows = g.ep_size * int64_t{checked_tokens_per_rank(tokens_per_rank, g)};
  const auto dense = [&](uint64_t start, int64_t height, int64_t width, ScalarType dtype) {
    return view_of(workspace, view, start, height, width, width * int64_t{sizeof(int32_t)}, dtype);
  };
  switch (bounded("index", index, 0, 3)) {
    case 0:
      return dense(layout.topk_ids.offset, rows, g.top_k, ScalarType::Int);
    case 1:
      return dense(layout.topk_weights.offset, rows, g.top_k, ScalarType::Float);
    case 2:
      return torch::stable::select(dense(layout.recv_counts.offset, 1, g.ep_size, ScalarType::Int),
                                   0, 0);
    default:
      return dense(layout.eplb_stats.offset, g.ep_size, g.eplb_stats_num_experts, ScalarType::Int);
  }
}

template <typename Library>
void implement(Library& m) {
  m.impl("received_rows_view", TORCH_BOX(&received_rows_view));
  m.impl("received_routing_view", TORCH_BOX(&received_routing_view));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) { implement(m); }

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CUDA, m) { implement(m); }

}  // namespace moe_ep::ops
