// What a kernel tells its host when the ranks were called with different arguments.
#pragma once

#include <cstdint>

#include "core/status_page.h"

namespace moe_ep {

// Whether the host has not yet looked at an earlier record, which is kept.
__device__ inline bool has_earlier_disagreement(const StatusPage* page) {
  return *const_cast<const volatile uint32_t*>(&page->disagreement.recorded) != 0;
}

// By the thread that knows that all of the record is written.
__device__ inline void publish_disagreement(StatusPage* page, Phase phase) {
  page->disagreement.phase = phase;
  __threadfence_system();  // the host sees `recorded` last
  *const_cast<volatile uint32_t*>(&page->disagreement.recorded) = 1;
}

__device__ inline void record_combine_disagreement(StatusPage* page) {
  if (!has_earlier_disagreement(page)) publish_disagreement(page, Phase::kCombine);
}

}  // namespace moe_ep
