// The columns of a parcel in one block, as they stand on the wire: slot u32, epoch u32, then for a
// dispatch weight f32, expert u16, fanout u8, part u8, for a combine part u8 alone.
#pragma once

#include <cstdint>
#include <cstring>

#include "view.h"

namespace columns {

constexpr py::ssize_t dispatch_bytes(py::ssize_t rows, py::ssize_t pairs) {
    return 9 * rows + 7 * pairs;
}

constexpr py::ssize_t combine_bytes(py::ssize_t rows) { return 9 * rows; }

// Whether a block of `size` bytes is one of so many rows and pairs, which may be any numbers.
constexpr bool is_dispatch(py::ssize_t size, py::ssize_t rows, py::ssize_t pairs) {
    return rows >= 0 && rows <= size && pairs >= 0 && pairs <= size &&
           size == dispatch_bytes(rows, pairs);
}

constexpr bool is_combine(py::ssize_t size, py::ssize_t rows) {
    return rows >= 0 && rows <= size && size == combine_bytes(rows);
}

// Elements of a block, which need not lie aligned.
template <typename T, typename Byte>
class Packed {
  public:
    explicit Packed(Byte* at) : at_(at) {}
    T operator[](py::ssize_t i) const {
        T value;
        std::memcpy(&value, at_ + i * sizeof(T), sizeof(T));
        return value;
    }
    void set(py::ssize_t i, T value) const { std::memcpy(at_ + i * sizeof(T), &value, sizeof(T)); }

  private:
    Byte* at_;
};

template <typename Byte>
struct Dispatch {
    Dispatch(Byte* block, py::ssize_t rows, py::ssize_t pairs)
        : slot(block),
          epoch(block + 4 * rows),
          weight(block + 8 * rows),
          expert(block + 8 * rows + 4 * pairs),
          fanout(block + 8 * rows + 6 * pairs),
          part(block + 9 * rows + 6 * pairs) {}

    Packed<uint32_t, Byte> slot, epoch;
    Packed<float, Byte> weight;
    Packed<uint16_t, Byte> expert;
    Packed<uint8_t, Byte> fanout, part;
};

template <typename Byte>
struct Combine {
    Combine(Byte* block, py::ssize_t rows)
        : slot(block), epoch(block + 4 * rows), part(block + 8 * rows) {}

    Packed<uint32_t, Byte> slot, epoch;
    Packed<uint8_t, Byte> part;
};

}  // namespace columns
