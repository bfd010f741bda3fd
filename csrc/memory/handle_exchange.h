// Brings every rank's handle to every other rank of a group on one host.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "memory/fd_channel.h"
#include "memory/shareable_handle.h"

namespace moe_ep::memory {

// Collective over the group. names: each rank's channel name, by rank. round: the same on all
// ranks, another one for each exchange. Returns the peers' handles by rank, none at the own place.
// A rank that fails tells the others, which then fail too instead of waiting: std::runtime_error
// names it. One that dies is missed within a second, and named in a std::system_error.
std::vector<std::optional<ShareableHandle>> exchange_handles(FdChannel& channel, int ep_rank,
                                                             const std::vector<std::string>& names,
                                                             uint32_t round,
                                                             const ShareableHandle& own,
                                                             const Patience& patience);

}  // namespace moe_ep::memory
