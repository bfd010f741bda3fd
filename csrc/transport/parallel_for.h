// How a transport gets at threads, without knowing whose they are.
#pragma once

#include <cstdint>
#include <functional>

namespace moe_ep {

// Runs `body(begin, end)` over chunks of [begin, end), perhaps on several threads; returns when all
// ended.
using ParallelFor = std::function<void(int64_t begin, int64_t end, int64_t grain,
                                       const std::function<void(int64_t, int64_t)>& body)>;

}  // namespace moe_ep
