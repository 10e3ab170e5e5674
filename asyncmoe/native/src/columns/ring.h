// A queue of plain values that can be rotated.
#pragma once

#include <cstddef>
#include <type_traits>
#include <vector>

namespace columns {

template <typename T>
class Ring {
    static_assert(std::is_trivially_copyable<T>::value, "they are moved as bytes");

  public:
    bool empty() const { return size_ == 0; }
    size_t size() const { return size_; }
    T& operator[](size_t i) { return slots_[(first_ + i) & (slots_.size() - 1)]; }
    const T& operator[](size_t i) const { return slots_[(first_ + i) & (slots_.size() - 1)]; }

    void push(T value) {
        if (size_ == slots_.size()) grow();
        (*this)[size_++] = value;
    }

    T pop() {
        const T value = (*this)[0];
        first_ = (first_ + 1) & (slots_.size() - 1);
        --size_;
        return value;
    }

    // The first `count` go behind the others, in order.
    void rotate(size_t count) {
        for (; count != 0; --count) push(pop());
    }

  private:
    void grow() {
        std::vector<T> bigger(slots_.empty() ? 8 : 2 * slots_.size());
        for (size_t i = 0; i < size_; ++i) bigger[i] = (*this)[i];
        slots_.swap(bigger);
        first_ = 0;
    }

    std::vector<T> slots_;  // a power of two of them
    size_t first_ = 0, size_ = 0;
};

}  // namespace columns
