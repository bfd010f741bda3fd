// Does RowCopy copy exactly the bytes it is told to, through the caches and around them? Every size
// and alignment around its vectors, with guard bytes on both sides.
#include "transport/copy_row.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

using moe_ep::RowCopy;

int main() {
  constexpr int64_t kGuard = 128;
  constexpr uint8_t kUntouched = 0xA5;
  std::mt19937 random(1);
  std::vector<uint8_t> from(20000), to(from.size() + 3 * kGuard);
  for (uint8_t& byte : from) byte = static_cast<uint8_t>(random());
  for (const int64_t bytes_of_round : {int64_t{0}, INT64_MAX}) {
    const RowCopy copy(bytes_of_round);
    for (int64_t bytes = 0; bytes <= 14400; bytes = bytes < 300 ? bytes + 1 : bytes + 47 * 64) {
      for (const int64_t shift : {0, 1, 8, 16, 48, 64}) {
        std::fill(to.begin(), to.end(), kUntouched);
        copy(to.data() + kGuard + shift, from.data() + shift, bytes);
        copy.finish();
        for (int64_t i = 0; i < static_cast<int64_t>(to.size()); ++i) {
          const int64_t at = i - kGuard - shift;
          const uint8_t want =
              at >= 0 && at < bytes ? from[static_cast<size_t>(at + shift)] : kUntouched;
          if (to[static_cast<size_t>(i)] == want) continue;
          std::printf("%ld bytes at shift %ld: byte %ld is wrong\n", static_cast<long>(bytes),
                      static_cast<long>(shift), static_cast<long>(at));
          return 1;
        }
      }
    }
  }
  std::puts("every byte right");
  return 0;
}
