// How the launchers of kernels that go as sum_items.cuh has it cut a step into pieces of 512 bytes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "one_sided/combine_plan.h"
#include "one_sided/cuda_launch.h"
#include "one_sided/device/sum_items.cuh"

namespace moe_ep::one_sided {

struct SumSizes {
  uint32_t stage_item_shift;
  uint32_t vectors_per_item;
  int items_per_cta;  // so many are worth another CTA
  int ctas_per_multiprocessor;
  uint32_t sum_warps;  // of a CTA
};

// Calls launch_kernel(stage, plan, ctas) and returns what that does.
template <typename LaunchKernel>
cudaError_t launch_sums(const CombineKernelParams& p, const SumSizes& sizes,
                        LaunchKernel launch_kernel) {
  if (p.pitch > kMaxPitch) return cudaErrorInvalidValue;
  const uint32_t vectors = vectors_per_row(p);
  const uint64_t items =
      tokens_per_rank(p) * SumPlan::items_per_row(vectors, sizes.vectors_per_item);
  if (items > kMaxItems) return cudaErrorInvalidValue;
  int multiprocessors = 0;
  const cudaError_t error = multiprocessors_to_fill(&multiprocessors);
  if (error != cudaSuccess) return error;
  const StagePlan stage = StagePlan::of(p, sizes.stage_item_shift);
  const int ctas = ctas_for(std::max(items, stage.max_items(p)), sizes.items_per_cta,
                            sizes.ctas_per_multiprocessor * multiprocessors);
  return launch_kernel(stage, SumPlan(p, vectors, sizes.vectors_per_item, ctas, sizes.sum_warps),
                       ctas);
}

}  // namespace moe_ep::one_sided
