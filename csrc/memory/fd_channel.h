// FdChannel: hands file descriptors from process to process on one host.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "memory/file_descriptor.h"
#include "memory/shareable_handle.h"

namespace moe_ep::memory {

// Known to the members of one group only; a message without it does not count.
using GroupNonce = std::array<std::byte, 16>;

// When a wait ends at the latest, and what it calls when a signal interrupts it (may throw to end
// it).
struct Patience {
  std::chrono::steady_clock::time_point deadline;
  std::function<void()> on_signal = [] {};
};

struct HandleMessage {
  int rank;        // of the sender, in the group
  uint32_t round;  // of the group's exchanges, so that a late message is recognised
  std::optional<ShareableHandle> handle;  // none: the sender has given up
};

// One end of it: an abstract Unix socket, which has no file and goes with its process. Its random
// name is told to the peers by other means. A message is one connection, so that a sender does not
// wait for its receiver; the kernel says who connected, and only the own user is listened to.
//
// All functions throw std::system_error, also when the deadline passes (ETIMEDOUT).
class FdChannel {
 public:
  FdChannel(int rank, const GroupNonce& nonce);
  // Move-only, by its descriptor.

  const std::string& name() const { return name_; }
  // What strangers sent: dropped, counted to explain a wait that ended without the message.
  int refused() const { return refused_; }
  // Connections over which nothing has come yet.
  size_t silent() const { return silent_.size(); }

  // Borrows the handle; null tells the receiver to give up.
  void send(const std::string& peer_name, uint32_t round, const ShareableHandle* handle,
            const Patience& patience) const;
  // Whether the peer's channel is gone, as that of a process that has died is. Waits for nobody.
  bool has_ended(const std::string& peer_name) const;

  // The next message of the group, whoever sent it.
  HandleMessage receive(const Patience& patience);
  // The same; none if it does not begin to arrive by then.
  std::optional<HandleMessage> receive_by(std::chrono::steady_clock::time_point then,
                                          const Patience& patience);

 private:
  void deliver(const std::string& peer_name, uint32_t content, uint32_t round,
               const ShareableHandle* handle, const Patience& patience) const;
  void accept_connection();
  std::optional<HandleMessage> read(const FileDescriptor& connection);

  int rank_;
  GroupNonce nonce_;
  std::string name_;
  FileDescriptor listener_;
  // Whoever has connected and said nothing yet: a peer may be stopped there for any time, and a
  // stranger that never speaks holds nobody up.
  std::vector<FileDescriptor> silent_;
  int refused_ = 0;
};

}  // namespace moe_ep::memory
