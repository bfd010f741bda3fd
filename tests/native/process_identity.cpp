// Asks without a pause whether children run that end and are reaped at any moment: the answer is
// no more than late, whatever /proc says in between.
#include "core/process_identity.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>

namespace {

constexpr int kChildren = 400;

// Whether the end of one child is seen, and not before it.
bool follow_one() {
  int pipe_ends[2];  // the child tells who it is, and waits for its end
  if (pipe(pipe_ends) != 0) std::abort();
  const pid_t child = fork();
  if (child < 0) std::abort();
  if (child == 0) {
    const moe_ep::ProcessIdentity own = moe_ep::own_process();
    if (write(pipe_ends[1], &own, sizeof(own)) != sizeof(own)) _exit(1);
    for (;;) pause();
  }
  moe_ep::ProcessIdentity identity{};
  const bool told = read(pipe_ends[0], &identity, sizeof(identity)) == sizeof(identity);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
  const bool ran = told && !moe_ep::has_ended(identity);
  std::jthread reaper([child] {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  });
  while (told && !moe_ep::has_ended(identity)) {
  }
  reaper.join();
  return ran && moe_ep::has_ended(identity);
}

}  // namespace

int main() {
  for (int i = 0; i < kChildren; ++i) {
    try {
      if (!follow_one()) {
        std::printf("child %d of %d: the wrong answer\n", i, kChildren);
        return 1;
      }
    } catch (const std::exception& error) {
      std::printf("child %d of %d: %s\n", i, kChildren, error.what());
      return 1;
    }
  }
  return 0;
}
