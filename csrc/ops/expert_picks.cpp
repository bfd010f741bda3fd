// Ops that bring received rows into their experts' groups and back, for CPU tensors. For those of
// other devices, and in compiled graphs, Python takes torch's own ops: moe_ep/pick_groups.py and
// moe_ep/pick_sums.py, which also say what a group and a pick are.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "core/limits.h"
#include "ops/errors.h"
#include "ops/parallel.h"
#include "ops/tensor_args.h"
#include "transport/huge_pages.h"
#include "transport/reduce_rows.h"

namespace moe_ep::ops {
namespace {

constexpr int64_t kRowsPerChunk = 16;  // a chunk is worth handing to another thread

template <typename T>
T* entries(const char* name, const Tensor& tensor, ScalarType dtype, int64_t count) {
  check(tensor.scalar_type() == dtype && tensor.is_contiguous() && tensor.numel() == count, name,
        " must be contiguous, with ", count, " elements");
  return static_cast<T*>(tensor.mutable_data_ptr());
}

RowsIn dense_rows(const char* name, const Tensor& rows) {
  check(has_dense_rows(rows), name, " must be 2-D with dense rows");
  return rows_in(rows);
}

// Gives each pick of a local expert the next row of that expert's group, in the order of the picks.
// Returns whether all found room. Outputs, of which row `room` and pick num_picks stand for none:
// counts [L] rows of each group; offsets [L + 1] where they begin; row_of_pick; pick_of_row [room].
bool group_picks(Tensor topk_ids, int64_t first_expert, int64_t alignment, Tensor counts,
                 Tensor offsets, Tensor row_of_pick, Tensor pick_of_row) {
  const int64_t num_picks = topk_ids.numel(), room = pick_of_row.numel();
  const int64_t num_experts = counts.numel();
  const auto* ids = entries<const int32_t>("topk_ids", topk_ids, ScalarType::Int, num_picks);
  auto* count = entries<int64_t>("counts", counts, ScalarType::Long, num_experts);
  auto* offset = entries<int64_t>("offsets", offsets, ScalarType::Long, num_experts + 1);
  auto* row_of = entries<int64_t>("row_of_pick", row_of_pick, ScalarType::Long, num_picks);
  auto* pick_of = entries<int64_t>("pick_of_row", pick_of_row, ScalarType::Long, room);
  // The bound keeps the sum of all groups' rows within int64.
  constexpr int64_t kMaxAlignment = std::numeric_limits<int32_t>::max();
  check(alignment >= 1 && alignment <= kMaxAlignment, "alignment must be 1..", kMaxAlignment,
        ", got ", alignment);

  const auto local = [&](int64_t pick) { return static_cast<int64_t>(ids[pick]) - first_expert; };
  const auto is_local = [&](int64_t expert) { return expert >= 0 && expert < num_experts; };
  std::fill_n(count, num_experts, 0);
  for (int64_t pick = 0; pick < num_picks; ++pick) {
    if (is_local(local(pick))) ++count[local(pick)];
  }
  std::vector<int64_t> next(static_cast<size_t>(num_experts));
  int64_t end = 0;
  bool all_found_room = true;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    next[static_cast<size_t>(expert)] = end;
    offset[expert] = std::min(end, room);
    end += (count[expert] + alignment - 1) / alignment * alignment;
    all_found_room = all_found_room && count[expert] <= room - offset[expert];
    count[expert] = std::min(count[expert], room - offset[expert]);
  }
  offset[num_experts] = std::min(end, room);
  std::fill_n(pick_of, room, num_picks);
  for (int64_t pick = 0; pick < num_picks; ++pick) {
    const int64_t expert = local(pick);
    row_of[pick] = is_local(expert) ? std::min(next[static_cast<size_t>(expert)]++, room) : room;
    if (row_of[pick] < room) pick_of[row_of[pick]] = pick;
  }
  return all_found_room;
}

// A row for each pick of a local expert, in the order that group_picks gives them without
// alignment: rows [M, columns]; experts [M, 1], their local ids; row_of_pick [num_rows, top_k], M
// for a pick that has none. Where no pick is local, M is 1: zeros for the first expert.
template <typename Id>
std::tuple<Tensor, Tensor, Tensor> rows_of_picks_from(const Tensor& source, const Id* ids,
                                                      int64_t num_rows, int64_t top_k,
                                                      int64_t first_expert, int64_t num_experts) {
  const int64_t num_picks = num_rows * top_k;
  const auto is_local = [&](Id id) {
    return id >= first_expert && id - first_expert < num_experts;
  };
  std::vector<int64_t> next(static_cast<size_t>(num_experts) + 1);  // of each expert
  for (int64_t pick = 0; pick < num_picks; ++pick) {
    if (is_local(ids[pick])) ++next[static_cast<size_t>(ids[pick] - first_expert) + 1];
  }
  std::partial_sum(next.begin(), next.end(), next.begin());
  const int64_t num_local = next.back(), room = std::max<int64_t>(num_local, 1);
  Tensor rows = torch::stable::new_empty(source, {room, source.size(1)});
  Tensor experts = torch::stable::new_empty(source, {room, 1}, ScalarType::Long);
  Tensor row_of_pick = torch::stable::new_empty(source, {num_rows, top_k}, ScalarType::Long);
  auto* expert = static_cast<int64_t*>(experts.mutable_data_ptr());
  auto* row_of = static_cast<int64_t*>(row_of_pick.mutable_data_ptr());
  std::vector<int64_t> source_row(static_cast<size_t>(room));
  for (int64_t pick = 0; pick < num_picks; ++pick) {
    row_of[pick] = room;
    if (!is_local(ids[pick])) continue;
    const int64_t local = ids[pick] - first_expert;
    row_of[pick] = next[static_cast<size_t>(local)]++;
    expert[row_of[pick]] = local;
    source_row[static_cast<size_t>(row_of[pick])] = pick / top_k;
  }
  const RowsIn from = rows_in(source);
  const auto bytes = static_cast<size_t>(from.row_bytes);
  auto* out = static_cast<uint8_t*>(rows.mutable_data_ptr());
  ask_for_huge_pages(out, room * from.row_bytes);
  if (num_local == 0) {
    expert[0] = 0;
    std::memset(out, 0, bytes);
  }
  torch_parallel_for()(0, num_local, kRowsPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = source_row[static_cast<size_t>(i)];
      std::memcpy(out + i * from.row_bytes, from.data + row * from.stride, bytes);
    }
  });
  return {rows, experts, row_of_pick};
}

std::tuple<Tensor, Tensor, Tensor> rows_of_picks(Tensor source, Tensor topk_ids,
                                                 int64_t first_expert, int64_t num_experts) {
  dense_rows("source", source);
  check(topk_ids.dim() == 2 && topk_ids.is_contiguous() && topk_ids.size(0) == source.size(0),
        "topk_ids must be contiguous [", source.size(0), ", top_k], a row for each of source");
  check(first_expert >= 0 && num_experts >= 0, "first_expert and num_experts must not be negative");
  const int64_t top_k = topk_ids.size(1);
  const auto of = [&](auto* ids) {
    return rows_of_picks_from(source, ids, source.size(0), top_k, first_expert, num_experts);
  };
  if (topk_ids.scalar_type() == ScalarType::Long) {
    return of(static_cast<const int64_t*>(topk_ids.const_data_ptr()));
  }
  check_dtype(topk_ids.scalar_type() == ScalarType::Int, "topk_ids must be int32 or int64");
  return of(static_cast<const int32_t*>(topk_ids.const_data_ptr()));
}

// Fills row i of the output with row index[i] of the source, or with zeros where there is none.
void copy_rows(Tensor source, Tensor index, Tensor output) {
  const RowsIn from = dense_rows("source", source);
  const int64_t num_sources = source.size(0), num_rows = index.numel();
  const auto* rows = entries<const int64_t>("index", index, ScalarType::Long, num_rows);
  auto* out = entries<uint8_t>("output", output, source.scalar_type(), num_rows * source.size(1));
  ask_for_huge_pages(out, num_rows * from.row_bytes);
  torch_parallel_for()(0, num_rows, kRowsPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      uint8_t* const to = out + i * from.row_bytes;
      const auto bytes = static_cast<size_t>(from.row_bytes);
      if (rows[i] >= 0 && rows[i] < num_sources) {
        std::memcpy(to, from.data + rows[i] * from.stride, bytes);
      } else {
        std::memset(to, 0, bytes);
      }
    }
  });
}

// Fills row n of the output with the sum of the rows of its picks, times their weights: in float32
// and in the order of the picks, rounded once. Where no pick has a row, it stays as it is, or
// becomes zeros.
void sum_rows(Tensor rows, std::optional<Tensor> weights, Tensor row_of_pick, Tensor output,
              bool zero_others) {
  const RowsIn from = dense_rows("rows", rows);
  const RowsIn sums = dense_rows("output", output);
  const RowType type = row_type_from(rows.scalar_type());
  check(row_of_pick.dim() == 2 && row_of_pick.size(1) <= kMaxTopK,
        "row_of_pick must be [num_rows, top_k <= ", kMaxTopK, "]");
  const int64_t num_sources = rows.size(0), num_rows = row_of_pick.size(0);
  const int64_t top_k = row_of_pick.size(1);
  check(output.scalar_type() == rows.scalar_type() && output.size(0) == num_rows &&
            sums.row_bytes == from.row_bytes,
        "output must be [", num_rows, ", ", rows.size(1), "] of the dtype of rows");
  const auto* picks =
      entries<const int64_t>("row_of_pick", row_of_pick, ScalarType::Long, num_rows * top_k);
  const float* factors = nullptr;
  if (weights.has_value()) {
    factors = entries<const float>("weights", *weights, ScalarType::Float, num_rows * top_k);
  }
  auto* out = static_cast<uint8_t*>(output.mutable_data_ptr());
  torch_parallel_for()(0, num_rows, kRowsPerChunk, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const uint8_t* addends[kMaxTopK];
      float factor[kMaxTopK];
      int32_t count = 0;
      for (int64_t pick = n * top_k; pick < (n + 1) * top_k; ++pick) {
        if (picks[pick] < 0 || picks[pick] >= num_sources) continue;
        addends[count] = from.data + picks[pick] * from.stride;
        factor[count++] = factors == nullptr ? 1.0f : factors[pick];
      }
      if (count == 0 && !zero_others) continue;
      reduce_weighted_rows(addends, factor, count, rows.size(1), type, out + n * sums.stride);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) {
  m.impl("group_picks", TORCH_BOX(&group_picks));
  m.impl("rows_of_picks", TORCH_BOX(&rows_of_picks));
  m.impl("copy_rows", TORCH_BOX(&copy_rows));
  m.impl("sum_rows", TORCH_BOX(&sum_rows));
}

}  // namespace moe_ep::ops
