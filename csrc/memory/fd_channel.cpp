#include "memory/fd_channel.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <utility>

#include "memory/system_error.h"

namespace moe_ep::memory {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

static_assert(!std::is_copy_constructible_v<FdChannel> &&
              std::is_nothrow_move_constructible_v<FdChannel>);

constexpr uint64_t kMagic = 0x6d6f652d65702d66;  // "moe-ep-f"; changes when the message does
constexpr uint32_t kHasHandle = 1;
constexpr uint32_t kGaveUp = 2;
constexpr uint32_t kNothing = 3;  // the sender wanted to know whether it could be sent

struct WireMessage {
  uint64_t magic;
  GroupNonce nonce;
  int32_t rank;
  uint32_t round;
  uint32_t content;
  uint32_t unused;
  uint64_t bytes;
};
static_assert(sizeof(WireMessage) == 48 && std::is_trivially_copyable_v<WireMessage>);

// Of exactly one descriptor. CMSG_SPACE would round up to room for two: the second would be ours to
// close.
struct ControlBuffer {
  alignas(cmsghdr) char bytes[CMSG_LEN(sizeof(int))] = {};
};

std::string random_name() {
  std::array<unsigned char, 16> random;
  if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) {
    throw_system_error("cannot draw a random socket name");
  }
  std::string name = "moe_ep-";
  for (const unsigned char byte : random) {
    constexpr char kDigits[] = "0123456789abcdef";
    name += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return name;
}

struct Address {
  sockaddr_un un{};
  socklen_t length;

  // In the abstract name space: a zero byte, then the name, no terminator.
  explicit Address(const std::string& name) {
    un.sun_family = AF_UNIX;
    if (name.empty() || name.size() > sizeof(un.sun_path) - 1) {
      throw std::invalid_argument("a socket name must have 1 to 107 bytes, got " +
                                  std::to_string(name.size()));
    }
    name.copy(un.sun_path + 1, name.size());
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&un); }
};

FileDescriptor open_socket() {
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) throw_system_error("cannot open a Unix socket");
  return FileDescriptor(fd);
}

milliseconds time_left(const Patience& patience) {
  const auto left = std::chrono::ceil<milliseconds>(patience.deadline - steady_clock::now());
  return std::clamp(left, milliseconds(0), milliseconds(std::chrono::hours(1)));
}

// Marks those that something has come for. False when the deadline passes.
bool become_readable(std::vector<pollfd>& sockets, const Patience& patience) {
  for (;;) {
    const auto left = time_left(patience);
    const int ready = poll(sockets.data(), sockets.size(), static_cast<int>(left.count()));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) throw_system_error("cannot wait for a message of a peer");
    if (ready < 0) patience.on_signal();
    if (ready == 0 && left.count() == 0) return false;
  }
}

[[noreturn]] void throw_timed_out() { throw_system_error("no message arrived in time", ETIMEDOUT); }

// The kernel has no event for "the peer's queue has room again" before a connection exists.
void pause_before_retry(const char* what, int error, const Patience& patience) {
  if (time_left(patience).count() == 0) throw_system_error(what, error);
  std::this_thread::sleep_for(milliseconds(1));
  patience.on_signal();
}

void connect_to(const FileDescriptor& socket, const std::string& peer_name,
                const Patience& patience) {
  const Address address(peer_name);
  while (connect(socket.get(), address.get(), address.length) != 0) {
    const int error = errno;
    if (error != EAGAIN && error != EINTR) {
      throw_system_error(
          "cannot reach the socket of a peer (has it ended, or another network namespace?)", error);
    }
    pause_before_retry("the socket queue of a peer stays full", error, patience);
  }
}

bool is_own_user(const FileDescriptor& connection) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == geteuid();
}

// The descriptors of a received message; all are owned, so that unwanted ones are closed.
FileDescriptor take_descriptor(msghdr& header) {
  FileDescriptor taken;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(part), sizeof(fd));  // the buffer has room for one
    taken = FileDescriptor(fd);
  }
  return taken;
}

}  // namespace

FdChannel::FdChannel(int rank, const GroupNonce& nonce)
    : rank_(rank), nonce_(nonce), name_(random_name()), listener_(open_socket()) {
  const Address address(name_);
  if (bind(listener_.get(), address.get(), address.length) != 0) {
    throw_system_error("cannot bind a Unix socket");
  }
  if (listen(listener_.get(), SOMAXCONN) != 0) throw_system_error("cannot listen on a Unix socket");
}

void FdChannel::send(const std::string& peer_name, uint32_t round, const ShareableHandle* handle,
                     const Patience& patience) const {
  if (handle != nullptr && handle->form() != HandleForm::kFileDescriptor) {
    throw std::invalid_argument(std::string("a socket carries file descriptors, got a ") +
                                name_of(handle->form()));
  }
  deliver(peer_name, handle ? kHasHandle : kGaveUp, round, handle, patience);
}

bool FdChannel::has_ended(const std::string& peer_name) const {
  try {
    deliver(peer_name, kNothing, 0, nullptr, Patience{steady_clock::now()});
  } catch (const std::system_error& error) {
    return error.code() == std::errc::connection_refused;  // a full queue belongs to somebody
  }
  return false;
}

void FdChannel::deliver(const std::string& peer_name, uint32_t content, uint32_t round,
                        const ShareableHandle* handle, const Patience& patience) const {
  const FileDescriptor socket = open_socket();
  connect_to(socket, peer_name, patience);

  WireMessage message{kMagic, nonce_, rank_, round, content, 0, handle ? handle->bytes() : 0};
  iovec data{&message, sizeof(message)};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  ControlBuffer control;
  if (handle != nullptr) {
    header.msg_control = control.bytes;
    header.msg_controllen = sizeof(control.bytes);
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = handle->descriptor();
    std::memcpy(CMSG_DATA(rights), &fd, sizeof(fd));
  }
  while (sendmsg(socket.get(), &header, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(message))) {
    const int error = errno;
    // ETOOMANYREFS: the user has as many descriptors in flight as the limit on open files allows.
    if (error != EAGAIN && error != EINTR && error != ETOOMANYREFS) {
      throw_system_error("cannot send a handle to a peer", error);
    }
    pause_before_retry("cannot send a handle to a peer", error, patience);
  }
}

HandleMessage FdChannel::receive(const Patience& patience) {
  auto message = receive_by(patience.deadline, patience);
  if (!message) throw_timed_out();
  return std::move(*message);
}

std::optional<HandleMessage> FdChannel::receive_by(steady_clock::time_point then,
                                                   const Patience& patience) {
  const Patience until_then{std::min(then, patience.deadline), patience.on_signal};
  for (;;) {
    std::vector<pollfd> sockets{{listener_.get(), POLLIN, 0}};
    for (const FileDescriptor& one : silent_) sockets.push_back({one.get(), POLLIN, 0});
    if (!become_readable(sockets, until_then)) return std::nullopt;
    const auto speaks = std::find_if(sockets.begin() + 1, sockets.end(),
                                     [](const pollfd& one) { return one.revents != 0; });
    if (speaks == sockets.end()) {
      accept_connection();
      continue;
    }
    const auto place = silent_.begin() + (speaks - sockets.begin() - 1);
    const FileDescriptor connection = std::move(*place);
    silent_.erase(place);
    if (auto message = read(connection)) return message;
  }
}

void FdChannel::accept_connection() {
  FileDescriptor connection(
      accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!connection) {
    if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return;
    throw_system_error("cannot accept the connection of a peer");
  }
  if (is_own_user(connection)) {
    silent_.push_back(std::move(connection));
  } else {
    ++refused_;
  }
}

// None if there is nothing in it for us.
std::optional<HandleMessage> FdChannel::read(const FileDescriptor& connection) {
  WireMessage message{};
  iovec data{&message, sizeof(message)};
  ControlBuffer control;
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control.bytes;
  header.msg_controllen = sizeof(control.bytes);
  const ssize_t got = recvmsg(connection.get(), &header, MSG_CMSG_CLOEXEC);
  if (got < 0) throw_system_error("cannot receive the message of a peer");
  FileDescriptor descriptor = take_descriptor(header);

  const bool complete =
      got == static_cast<ssize_t>(sizeof(message)) && (header.msg_flags & MSG_TRUNC) == 0;
  if (!complete || message.magic != kMagic || message.nonce != nonce_) {
    ++refused_;
    return std::nullopt;
  }
  if (message.content == kNothing) return std::nullopt;
  if (message.content == kGaveUp) return HandleMessage{message.rank, message.round, std::nullopt};
  if ((header.msg_flags & MSG_CTRUNC) != 0 || !descriptor) {
    throw_system_error(
        "the handle of rank " + std::to_string(message.rank) +
            " arrived without its descriptor (limit on open files, `ulimit -n`, reached?)",
        EMFILE);
  }
  return HandleMessage{message.rank, message.round,
                       ShareableHandle(std::move(descriptor), message.bytes)};
}

}  // namespace moe_ep::memory
