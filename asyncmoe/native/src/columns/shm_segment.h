// A segment of shared memory, see transports/shm_segment.py: where what lies, and how it is
// accessed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "prelude.h"

namespace columns {

// A u32 that one side writes and the other reads, never in halves.
inline uint32_t load(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline void store(uint32_t* word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

// What was read and written before is done before all that comes after.
inline void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

class Segment {
  public:
    // `memory` is held, and may be read-only. The others are offsets of a `Geometry`, in bytes.
    Segment(const py::buffer& memory, int64_t slots, int64_t slot_bytes, int64_t ring_at,
            int64_t columns_at, int64_t slots_at)
        : slots(slots),
          slot_bytes(slot_bytes),
          memory_(memory.request()),
          ring_at_(ring_at),
          columns_at_(columns_at),
          slots_at_(slots_at) {}

    int64_t count(uint64_t nbytes) const {
        return std::max<int64_t>(1, (static_cast<int64_t>(nbytes) + slot_bytes - 1) / slot_bytes);
    }

    uint32_t* waiting(int kind) const { return word(kind - 1); }
    uint32_t* sleeps() const { return word(3); }
    uint32_t* published(int kind) const { return word(3 + kind); }
    uint32_t* reclaimed(int kind, int64_t slot) const {
        return word(16 + (kind - 1) * slots + slot);
    }
    uint8_t* entry(int kind, uint32_t number) const {
        return base() + ring_at_ + ((kind - 1) * slots + number % slots) * kPreludeBytes;
    }
    uint8_t* columns(int kind, int64_t slot) const {
        return base() + columns_at_ + ((kind - 1) * slots + slot) * slot_bytes;
    }
    uint8_t* payload(int kind, int64_t slot) const {
        return base() + slots_at_ + ((kind - 1) * slots + slot) * slot_bytes;
    }

    const int64_t slots, slot_bytes;

  private:
    uint8_t* base() const { return static_cast<uint8_t*>(memory_.ptr); }
    uint32_t* word(int64_t index) const { return reinterpret_cast<uint32_t*>(base()) + index; }

    const py::buffer_info memory_;
    const int64_t ring_at_, columns_at_, slots_at_;
};

}  // namespace columns
