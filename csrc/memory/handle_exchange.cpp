#include "memory/handle_exchange.h"

#include <exception>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "memory/system_error.h"

namespace moe_ep::memory {
namespace {

using Handles = std::vector<std::optional<ShareableHandle>>;

void accept_message(Handles& handles, int ep_rank, uint32_t round, HandleMessage message) {
  const auto ranks = static_cast<int>(handles.size());
  const std::string sender = "rank " + std::to_string(message.rank);
  if (!message.handle) throw std::runtime_error(sender + " gave up the exchange of handles");
  if (message.rank < 0 || message.rank >= ranks || message.rank == ep_rank ||
      handles[message.rank]) {
    throw std::runtime_error("one handle of each peer in [0, " + std::to_string(ranks) +
                             ") is wanted, got another one of " + sender);
  }
  if (message.round != round) {
    throw std::runtime_error(sender + " is in exchange " + std::to_string(message.round) +
                             " of the group, this rank in " + std::to_string(round));
  }
  handles[message.rank] = std::move(message.handle);
}

void receive_until(const std::optional<ShareableHandle>& wanted, FdChannel& channel, int ep_rank,
                   int from_rank, uint32_t round, Handles& handles, const Patience& patience) {
  while (!wanted) {
    try {
      accept_message(handles, ep_rank, round, channel.receive(patience));
    } catch (const std::system_error& error) {
      if (error.code() != std::errc::timed_out) throw;
      throw_system_error("no handle of rank " + std::to_string(from_rank) + " arrived in time (" +
                             std::to_string(channel.refused()) + " messages of strangers refused)",
                         ETIMEDOUT);
    }
  }
}

void tell_peers_to_give_up(const FdChannel& channel, int ep_rank,
                           const std::vector<std::string>& names, uint32_t round) noexcept {
  for (int rank = 0; rank < static_cast<int>(names.size()); ++rank) {
    if (rank == ep_rank) continue;
    try {
      channel.send(names[rank], round, nullptr, Patience{std::chrono::steady_clock::now()});
    } catch (const std::exception&) {
      // It has ended or is stuck: its own deadline holds.
    }
  }
}

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
  Handles handles(names.size());
  try {
    for (int step = 1; step < ranks; ++step) {
      const int to = (ep_rank + step) % ranks;
      const int from = (ep_rank - step + ranks) % ranks;
      channel.send(names[to], round, &own, patience);
      receive_until(handles[from], channel, ep_rank, from, round, handles, patience);
    }
  } catch (...) {
    tell_peers_to_give_up(channel, ep_rank, names, round);
    throw;
  }
  return handles;
}

}  // namespace moe_ep::memory
