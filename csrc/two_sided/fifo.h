// The two ends of a FIFO, for one stream of records. None of their functions waits.
//
// The slots and `head` are in the receiver's segment, `tail` in the sender's: each end polls its
// own memory. head - tail slots are full, and wrap with their 32 bits. Slots are ordered by `head`,
// which the sender releases and the receiver acquires; their reuse by `tail`, the other way round.
//
// Every stream begins with an empty FIFO: between two streams of a pair lies a meeting of all ranks
// (transport/agreement.h) that the receiver reaches only when the earlier stream is through.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "core/host_signal.h"
#include "two_sided/pieces.h"
#include "two_sided/segment.h"

namespace moe_ep::two_sided {

class Sender {
 public:
  Sender(const WorkspaceView& workspace, const FifoLayout& layout, int32_t peer,
         const Pieces& pieces)
      : own_rank_(workspace.ep_rank),
        num_slots_(static_cast<uint32_t>(workspace.geometry.num_slots)),
        receiver_(workspace, layout, peer),
        tail_(Segment(workspace, layout, own_rank_).tail(peer)),
        head_(*receiver_.head(own_rank_)),  // which only this rank writes
        pieces_(pieces) {}

  bool is_done() const { return pieces_.at_end(); }

  // Fills the slots that are free; returns whether there was any.
  // copy(record, begin, bytes, to) brings bytes [begin, begin + bytes) of a record to a slot.
  template <typename Copy>
  bool push(Copy copy) {
    bool any = false;
    while (!is_done() && head_ - load_acquire(tail_) != num_slots_) {
      uint8_t* slot = receiver_.slot(own_rank_, head_);
      for (bool slot_is_full = false; !slot_is_full; pieces_.advance()) {
        copy(pieces_.record(), pieces_.begin(), pieces_.bytes(), slot + pieces_.offset_in_slot());
        slot_is_full = pieces_.ends_slot();
      }
      store_release(receiver_.head(own_rank_), ++head_);
      any = true;
    }
    // Once for all of them: a receiver that is woken for each would take the core from the sender.
    if (any) ring(receiver_.bell(), &receiver_.control().sleepers);
    return any;
  }

 private:
  int32_t own_rank_;
  uint32_t num_slots_;
  Segment receiver_;
  const uint32_t* tail_;
  uint32_t head_;
  Pieces pieces_;
};

class Receiver {
 public:
  Receiver(const WorkspaceView& workspace, const FifoLayout& layout, int32_t peer,
           const Pieces& pieces)
      : own_rank_(workspace.ep_rank),
        peer_(peer),
        own_(workspace, layout, own_rank_),
        sender_(workspace, layout, peer),
        tail_(*sender_.tail(own_rank_)),  // which only this rank writes
        head_(tail_),
        slots_to_take_(pieces.num_slots()),
        pieces_(pieces) {}

  bool is_done() const { return pieces_.at_end(); }
  const Pieces& piece() const { return pieces_; }

  // The bytes of the next piece, if they have come; valid until `take`. Else null.
  const uint8_t* arrived() {
    if (is_done()) return nullptr;
    if (head_ == tail_) head_ = load_acquire(own_.head(peer_));
    return head_ == tail_ ? nullptr : own_.slot(peer_, tail_) + pieces_.offset_in_slot();
  }

  // Goes to the next piece. Its slot is free again when all its pieces are taken.
  void take() {
    const bool slot_is_empty = pieces_.ends_slot();
    pieces_.advance();
    if (!slot_is_empty) return;
    store_release(sender_.tail(own_rank_), ++tail_);
    --slots_to_take_;
    has_freed_ = true;
  }

  // Wakes a sender that may be waiting for a slot that was freed since the last call; returns
  // whether any was.
  bool tell_sender() {
    const bool any = has_freed_;
    has_freed_ = false;
    const bool more_will_come = slots_to_take_ > static_cast<int64_t>(head_ - tail_);
    if (any && more_will_come) ring(sender_.bell(), &sender_.control().sleepers);
    return any;
  }

 private:
  int32_t own_rank_;
  int32_t peer_;
  Segment own_;
  Segment sender_;
  uint32_t tail_;
  uint32_t head_;  // as last seen
  int64_t slots_to_take_;
  Pieces pieces_;
  bool has_freed_ = false;
};

// Gives whole records, wherever their pieces are.
class RecordReceiver {
 public:
  RecordReceiver(const WorkspaceView& workspace, const FifoLayout& layout, int32_t peer,
                 const Pieces& pieces)
      : receiver_(workspace, layout, peer, pieces) {}

  bool is_done() const { return receiver_.is_done(); }

  // The next record if it has come; valid until `take`. Else null.
  const uint8_t* arrived() {
    if (!receiver_.piece().splits_records()) return receiver_.arrived();
    while (!is_assembled_) {
      const uint8_t* bytes = receiver_.arrived();
      if (bytes == nullptr) return nullptr;
      const Pieces& piece = receiver_.piece();
      record_.resize(static_cast<size_t>(piece.begin() + piece.bytes()));
      std::memcpy(record_.data() + piece.begin(), bytes, static_cast<size_t>(piece.bytes()));
      is_assembled_ = piece.ends_record();
      receiver_.take();
    }
    return record_.data();
  }

  void take() {
    if (!receiver_.piece().splits_records()) return receiver_.take();
    is_assembled_ = false;
  }

  bool tell_sender() { return receiver_.tell_sender(); }

 private:
  Receiver receiver_;
  std::vector<uint8_t> record_;
  bool is_assembled_ = false;
};

}  // namespace moe_ep::two_sided
