#include "memory/segmented_memory.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace moe_ep::memory {
namespace {

template <typename T>
constexpr bool kMoveOnly =
    std::is_nothrow_move_constructible_v<T> && !std::is_copy_constructible_v<T>;
static_assert(kMoveOnly<AddressRange> && kMoveOnly<PhysicalAllocation> && kMoveOnly<Mapping>);
static_assert(kMoveOnly<ShareableHandle> && kMoveOnly<FileDescriptor>);

// Room without memory behind each segment. Wide enough that an overrun by a few rows does not jump
// it; costs only addresses.
constexpr uint64_t kGuardBytes = uint64_t{1} << 20;

// No machine has more addresses than this; all sums below stay far from 2^64.
constexpr uint64_t kMaxRangeBytes = uint64_t{1} << 56;

constexpr uint64_t round_up(uint64_t bytes, uint64_t granularity) {
  return (bytes + granularity - 1) / granularity * granularity;
}

int checked_size(int ep_rank, int ep_size) {
  if (ep_size < 1 || ep_rank < 0 || ep_rank >= ep_size) {
    throw std::invalid_argument("ep_rank must lie in [0, ep_size), got ep_rank " +
                                std::to_string(ep_rank) + ", ep_size " + std::to_string(ep_size));
  }
  return ep_size;
}

}  // namespace

RangeGeometry RangeGeometry::of(uint64_t ep_size, uint64_t segment_bytes, uint64_t granularity) {
  if (segment_bytes < 1 || segment_bytes > kMaxRangeBytes) {
    throw std::invalid_argument("segment_bytes must lie in [1, 2^56], got " +
                                std::to_string(segment_bytes));
  }
  RangeGeometry g;
  g.segment_bytes = segment_bytes;
  g.mapped_bytes = round_up(segment_bytes, granularity);
  g.rank_stride = g.mapped_bytes + round_up(kGuardBytes, granularity);
  if (g.rank_stride > kMaxRangeBytes / ep_size) {
    throw std::invalid_argument("segments of " + std::to_string(segment_bytes) + " bytes for " +
                                std::to_string(ep_size) +
                                " ranks exceed the address space (2^56 bytes)");
  }
  g.range_bytes = g.rank_stride * ep_size;
  return g;
}

SegmentedMemory::SegmentedMemory(MemoryKind& kind, int ep_rank, int ep_size, uint64_t segment_bytes)
    : ep_rank_(ep_rank),
      geometry_(RangeGeometry::of(static_cast<uint64_t>(checked_size(ep_rank, ep_size)),
                                  segment_bytes, kind.granularity())),
      range_(kind, geometry_.range_bytes),
      segments_(static_cast<size_t>(ep_size)) {}

void SegmentedMemory::back_own_segment(HandleForm form) {
  require(State::kReleased, "back_own_segment");
  auto memory = PhysicalAllocation::create(range_.kind(), geometry_.mapped_bytes, form);
  segments_[ep_rank_].emplace(range_, offset_of(ep_rank_), memory);
  own_memory_.emplace(std::move(memory));
  state_ = State::kJoining;
  become_mapped_when_complete();
}

ShareableHandle SegmentedMemory::share_own_segment() const {
  require(State::kJoining, "share_own_segment");
  return own_memory_->share();
}

void SegmentedMemory::map_peer_segment(int rank, ShareableHandle handle) {
  require(State::kJoining, "map_peer_segment");
  if (rank < 0 || rank >= ep_size() || segments_[rank]) {
    throw std::invalid_argument("rank must be a peer in [0, " + std::to_string(ep_size()) +
                                ") whose segment is not mapped yet, got " + std::to_string(rank));
  }
  if (handle.bytes() != geometry_.mapped_bytes) {
    throw std::invalid_argument("the segment of rank " + std::to_string(rank) + " must have " +
                                std::to_string(geometry_.mapped_bytes) +
                                " bytes like all others, got " + std::to_string(handle.bytes()));
  }
  const auto memory = PhysicalAllocation::import(range_.kind(), std::move(handle));
  segments_[rank].emplace(range_, offset_of(rank), memory);
  become_mapped_when_complete();
}

void SegmentedMemory::release() {
  if (state_ == State::kBroken) return;
  own_memory_.reset();
  std::exception_ptr failure;
  for (auto& segment : segments_) {
    try {
      if (segment) segment->unmap();
      segment.reset();
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
  }
  state_ = failure ? State::kBroken : State::kReleased;
  if (failure) std::rethrow_exception(failure);
}

void SegmentedMemory::break_off() {
  release();
  state_ = State::kBroken;
}

void SegmentedMemory::require(State wanted, const char* step) const {
  if (state_ == wanted) return;
  throw std::runtime_error(std::string(step) + " needs memory that is " + name_of(wanted) +
                           ", got " + name_of(state_));
}

void SegmentedMemory::become_mapped_when_complete() {
  if (!std::ranges::all_of(segments_, [](const auto& segment) { return segment.has_value(); }))
    return;
  // Its mapping holds the memory; no descriptor stays open. A peer may still have to import it by a
  // FABRIC handle, which finds the memory only while its owner has it open.
  if (own_memory_->form() == HandleForm::kFileDescriptor) own_memory_.reset();
  state_ = State::kMapped;
}

const char* name_of(SegmentedMemory::State state) {
  switch (state) {
    case SegmentedMemory::State::kReleased:
      return "released";
    case SegmentedMemory::State::kJoining:
      return "joining";
    case SegmentedMemory::State::kMapped:
      return "mapped";
    case SegmentedMemory::State::kBroken:
      return "broken";
  }
  return "in no known state";
}

}  // namespace moe_ep::memory
