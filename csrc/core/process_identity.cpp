#include "core/process_identity.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

namespace moe_ep {
namespace {

struct ProcessStat {
  char state;
  int64_t num_threads;
  uint64_t started;
};

// nullopt where /proc does not say: it may be hidden, or not be there, or go while it is read.
std::optional<ProcessStat> stat_of(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  // By `read`, which does not throw when the process ends now; an iterator over the buffer does.
  char text[4096];
  file.read(text, sizeof(text));
  const std::string line(text, static_cast<size_t>(file.gcount()));
  // The second field is the program's name in parentheses, with any characters.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  constexpr int kNumThreads = 20;  // the fields' numbers in proc(5)
  constexpr int kStarted = 22;
  std::istringstream fields(line.substr(name_end + 1));
  ProcessStat stat{};
  std::string skipped;
  fields >> stat.state;  // field 3
  for (int field = 4; field < kNumThreads; ++field) fields >> skipped;
  fields >> stat.num_threads;
  for (int field = kNumThreads + 1; field < kStarted; ++field) fields >> skipped;
  fields >> stat.started;
  return fields ? std::optional(stat) : std::nullopt;
}

uint64_t own_pid_namespace() {
  struct stat found{};
  return stat("/proc/self/ns/pid", &found) == 0 ? static_cast<uint64_t>(found.st_ino) : 0;
}

}  // namespace

ProcessIdentity own_process() {
  const int64_t pid = getpid();
  const std::optional<ProcessStat> stat = stat_of(pid);
  return {pid, stat ? stat->started : 0, own_pid_namespace()};
}

bool has_ended(const ProcessIdentity& process) {
  if (process.pid <= 0 || process.pid_namespace == 0) return false;
  if (process.pid_namespace != own_pid_namespace()) return false;
  if (kill(static_cast<pid_t>(process.pid), 0) != 0 && errno == ESRCH) return true;
  const std::optional<ProcessStat> now = stat_of(process.pid);
  if (!now || process.started == 0) return false;
  if (now->started != process.started) return true;  // another one has its id
  // Its parent has not asked for it yet. (Where threads outlive the first one, it shows as such a
  // process, too, and runs.)
  return (now->state == 'Z' || now->state == 'X') && now->num_threads <= 1;
}

}  // namespace moe_ep
