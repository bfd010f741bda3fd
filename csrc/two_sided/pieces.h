// How a stream of equal records lies in slots. Both ends of a FIFO count with it, so that they
// cannot differ and nothing but the records has to travel: as many whole records in a slot as fit,
// or, where a record is wider than a slot, one record in as many slots as it needs.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moe_ep::two_sided {

// Walks a stream piece by piece. A piece is a record, or the part of one that a slot holds.
class Pieces {
 public:
  Pieces(int64_t num_records, int64_t record_bytes, int64_t slot_bytes)
      : num_records_(num_records),
        record_bytes_(record_bytes),
        slot_bytes_(slot_bytes),
        records_per_slot_(std::max<int64_t>(1, slot_bytes / record_bytes)) {}

  bool splits_records() const { return record_bytes_ > slot_bytes_; }
  // Of the whole stream.
  int64_t num_slots() const {
    if (!splits_records()) return (num_records_ + records_per_slot_ - 1) / records_per_slot_;
    return num_records_ * ((record_bytes_ + slot_bytes_ - 1) / slot_bytes_);
  }

  bool at_end() const { return record_ == num_records_; }
  // The piece at hand: bytes [begin, begin + bytes) of a record, and where they are in their slot.
  int64_t record() const { return record_; }
  int64_t begin() const { return begin_; }
  int64_t bytes() const { return std::min(record_bytes_ - begin_, slot_bytes_); }
  int64_t offset_in_slot() const { return place_in_slot_ * record_bytes_; }
  bool ends_record() const { return begin_ + bytes() == record_bytes_; }
  bool ends_slot() const {
    return splits_records() || place_in_slot_ + 1 == records_per_slot_ ||
           record_ + 1 == num_records_;
  }

  void advance() {
    place_in_slot_ = ends_slot() ? 0 : place_in_slot_ + 1;
    const bool record_is_over = ends_record();
    begin_ = record_is_over ? 0 : begin_ + slot_bytes_;
    record_ += record_is_over;
  }

 private:
  int64_t num_records_;
  int64_t record_bytes_;
  int64_t slot_bytes_;
  int64_t records_per_slot_;
  int64_t record_ = 0;
  int64_t begin_ = 0;
  int64_t place_in_slot_ = 0;
};

}  // namespace moe_ep::two_sided
