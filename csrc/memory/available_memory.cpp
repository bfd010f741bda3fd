#include "memory/available_memory.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace moe_ep::memory {
namespace {

constexpr uint64_t kUnknown = std::numeric_limits<uint64_t>::max();

// The number behind `key` in a file of lines "key number ...".
std::optional<uint64_t> number_of(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string name;
  uint64_t value = 0;
  while (file >> name) {
    if (name == key && file >> value) return value;
    file.clear();
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::nullopt;
}

std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // no such file, or the word "max"
}

uint64_t left(uint64_t limit, uint64_t used) { return limit > used ? limit - used : 0; }

AvailableMemory of_machine() {
  constexpr uint64_t kKiB = 1024;
  const auto available = number_of("/proc/meminfo", "MemAvailable:");
  if (!available) return {kUnknown, 0};
  return {(*available + number_of("/proc/meminfo", "SwapFree:").value_or(0)) * kKiB, 0};
}

// The names that the two versions of control groups give to the same facts.
struct GroupFiles {
  const char* mount;
  const char* limit;
  const char* used;
  const char* file_cache;
  const char* shared_memory;
};
constexpr GroupFiles kVersion1{"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                               "memory.usage_in_bytes", "total_cache", "total_shmem"};
constexpr GroupFiles kVersion2{"/sys/fs/cgroup", "memory.max", "memory.current", "file", "shmem"};

// What one control group allows beyond what it uses. File cache counts as used there but is given
// back under pressure, except shared memory, which is counted in it.
std::optional<AvailableMemory> of_group(const std::string& folder, const GroupFiles& files) {
  const auto limit = number_in(folder + "/" + files.limit);
  const auto used = number_in(folder + "/" + files.used);
  struct stat status{};
  if (!limit || !used || stat(folder.c_str(), &status) != 0) return std::nullopt;
  const std::string statistics = folder + "/memory.stat";
  const uint64_t cache = left(number_of(statistics, files.file_cache).value_or(0),
                              number_of(statistics, files.shared_memory).value_or(0));
  return AvailableMemory{left(*limit, left(*used, cache)), status.st_ino};
}

// The group of /proc/self/cgroup and all above it, up to the mount. In a container the path may be
// one of the host's that is not there: then the walk ends at the mount, which is the container's
// group.
void tighten(AvailableMemory& least, const GroupFiles& files, std::filesystem::path group) {
  for (;; group = group.parent_path()) {
    const auto here = of_group(files.mount + group.string(), files);
    if (here && here->bytes < least.bytes) least = *here;
    if (!group.has_relative_path()) return;
  }
}

}  // namespace

AvailableMemory available_memory() {
  AvailableMemory least = of_machine();
  std::ifstream groups("/proc/self/cgroup");  // lines "number:controllers:/path"
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") tighten(least, kVersion2, path);
    if (controllers.find(",memory,") != std::string::npos) tighten(least, kVersion1, path);
  }
  return least;
}

}  // namespace moe_ep::memory
