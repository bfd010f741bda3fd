#include "memory/handle_exchange.h"

#include <chrono>
#include <exception>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "memory/system_error.h"

namespace moe_ep::memory {
namespace {

using std::chrono::steady_clock;
using Handles = std::vector<std::optional<ShareableHandle>>;

// How often a waiting rank looks whether the one that it waits for is still there. No event tells,
// and each look costs that one a connection.
constexpr std::chrono::milliseconds kBetweenLooks(500);

std::string name_of_rank(int rank) { return "rank " + std::to_string(rank); }

[[noreturn]] void throw_has_left(int rank, int error) {
  throw_system_error(name_of_rank(rank) +
                         " has left the exchange of handles (has it ended, or is it in another "
                         "network namespace?)",
                     error);
}

// The part of one rank.
class Exchange {
 public:
  Exchange(FdChannel& channel, int ep_rank, const std::vector<std::string>& names, uint32_t round,
           const Patience& patience)
      : channel_(channel),
        ep_rank_(ep_rank),
        names_(names),
        round_(round),
        patience_(patience),
        handles_(names.size()) {}

  void send_to(int rank, const ShareableHandle& own) {
    try {
      channel_.send(names_[rank], round_, &own, patience_);
    } catch (const std::system_error& error) {
      if (error.code() != std::errc::connection_refused) throw;
      throw_has_left(rank, ECONNREFUSED);
    }
  }

  // Takes what others send meanwhile, too.
  void receive_from(int rank) {
    bool has_left = false;
    while (!handles_[rank]) {
      // What it sent before it left lies in our queue already.
      const auto turn =
          steady_clock::now() + (has_left ? steady_clock::duration(0) : kBetweenLooks);
      if (auto message = channel_.receive_by(turn, patience_)) {
        accept(std::move(*message));
      } else if (has_left) {
        throw_has_left(rank, ECONNRESET);
      } else if (steady_clock::now() >= patience_.deadline) {
        throw_system_error("no handle of " + name_of_rank(rank) + " arrived in time (" +
                               std::to_string(channel_.refused()) +
                               " messages of strangers refused, " +
                               std::to_string(channel_.silent()) + " connections silent)",
                           ETIMEDOUT);
      } else {
        has_left = channel_.has_ended(names_[rank]);
      }
    }
  }

  void tell_peers_to_give_up() const noexcept {
    for (int rank = 0; rank < ranks(); ++rank) {
      if (rank == ep_rank_) continue;
      try {
        channel_.send(names_[rank], round_, nullptr, Patience{steady_clock::now()});
      } catch (const std::exception&) {
        // It has ended or is stuck: its own deadline holds.
      }
    }
  }

  Handles take_handles() { return std::move(handles_); }

 private:
  int ranks() const { return static_cast<int>(names_.size()); }

  void accept(HandleMessage message) {
    const std::string sender = name_of_rank(message.rank);
    if (!message.handle) throw std::runtime_error(sender + " gave up the exchange of handles");
    if (message.rank < 0 || message.rank >= ranks() || message.rank == ep_rank_ ||
        handles_[message.rank]) {
      throw std::runtime_error("one handle of each peer in [0, " + std::to_string(ranks()) +
                               ") is wanted, got another one of " + sender);
    }
    if (message.round != round_) {
      throw std::runtime_error(sender + " is in exchange " + std::to_string(message.round) +
                               " of the group, this rank in " + std::to_string(round_));
    }
    handles_[message.rank] = std::move(message.handle);
  }

  FdChannel& channel_;
  int ep_rank_;
  const std::vector<std::string>& names_;
  uint32_t round_;
  const Patience& patience_;
  Handles handles_;
};

}  // namespace

// Step by step around the ring: to the rank `step` places on, from the one `step` places back. So
// each rank has one handle in flight most of the time, and the system's limit on those holds for
// large groups.
std::vector<std::optional<ShareableHandle>> exchange_handles(FdChannel& channel, int ep_rank,
                                                             const std::vector<std::string>& names,
                                                             uint32_t round,
                                                             const ShareableHandle& own,
                                                             const Patience& patience) {
  const auto ranks = static_cast<int>(names.size());
  if (ep_rank < 0 || ep_rank >= ranks) {
    throw std::invalid_argument("names must have one entry a rank, got " + std::to_string(ranks) +
                                " for rank " + std::to_string(ep_rank));
  }
  Exchange exchange(channel, ep_rank, names, round, patience);
  try {
    for (int step = 1; step < ranks; ++step) {
      exchange.send_to((ep_rank + step) % ranks, own);
      exchange.receive_from((ep_rank - step + ranks) % ranks);
    }
  } catch (...) {
    exchange.tell_peers_to_give_up();
    throw;
  }
  return exchange.take_handles();
}

}  // namespace moe_ep::memory
