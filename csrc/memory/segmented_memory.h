// SegmentedMemory: one range of addresses in which every rank of a group has a segment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "memory/address_range.h"
#include "memory/mapping.h"
#include "memory/physical_allocation.h"

namespace moe_ep::memory {

// Sizes of a range, from what the user asks for. Throws std::invalid_argument if they cannot be
// had.
struct RangeGeometry {
  uint64_t segment_bytes;  // as asked for
  uint64_t mapped_bytes;   // behind each segment: segment_bytes in whole granules
  uint64_t rank_stride;  // from one segment to the next: more than mapped_bytes, so that an overrun
                         // faults
  uint64_t range_bytes;

  static RangeGeometry of(uint64_t ep_size, uint64_t segment_bytes, uint64_t granularity);
};

//   Released --back_own_segment--> Joining --map_peer_segment of every peer--> Mapped
//       ^------------------------- release ----------------------------------------'
//
// The addresses stay the same through all of it, the contents do not: memory starts zero-filled.
// The first allocation and a later restore are the same steps. Broken ends it: some peer may have
// gone another way. The steps of the ranks are brought together from outside; nothing here waits.
// Not for use by several threads at once.
class SegmentedMemory {
 public:
  enum class State { kReleased, kJoining, kMapped, kBroken };

  // Reserves the addresses; no memory yet.
  SegmentedMemory(MemoryKind& kind, int ep_rank, int ep_size, uint64_t segment_bytes);
  SegmentedMemory(const SegmentedMemory&) = delete;
  SegmentedMemory& operator=(const SegmentedMemory&) = delete;

  // This rank's new memory, mapped at its own segment. With ep_size 1 that is all. form: in which
  // the peers get it.
  void back_own_segment(HandleForm form);
  // For the peers to import. Only while joining.
  ShareableHandle share_own_segment() const;
  // Maps the memory behind a peer's handle at that peer's segment.
  void map_peer_segment(int rank, ShareableHandle handle);
  // Drops the memory of all segments and keeps their addresses: touching them faults. What peers
  // have mapped of this rank's memory goes when they release it too.
  void release();
  // release() for good: no step is allowed after it.
  void break_off();

  State state() const { return state_; }
  int ep_rank() const { return ep_rank_; }
  int ep_size() const { return static_cast<int>(segments_.size()); }
  const RangeGeometry& geometry() const { return geometry_; }
  std::byte* base() const { return range_.base(); }
  const MemoryKind& kind() const { return range_.kind(); }

 private:
  void require(State wanted, const char* step) const;
  uint64_t offset_of(int rank) const { return static_cast<uint64_t>(rank) * geometry_.rank_stride; }
  void become_mapped_when_complete();

  int ep_rank_;
  RangeGeometry geometry_;
  State state_ = State::kReleased;
  AddressRange range_;                            // before what lies in it: freed last
  std::optional<PhysicalAllocation> own_memory_;  // while it can be shared
  std::vector<std::optional<Mapping>> segments_;  // by rank
};

const char* name_of(SegmentedMemory::State state);

}  // namespace moe_ep::memory
