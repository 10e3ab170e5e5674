// Memory that kernels of one thread use again and again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace asyncmoe {

// Grows to the most that was ever asked for. Contents are lost by `take`.
class Scratch {
   public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { release(); }

    // `count` elements, aligned to a cache line. Throws std::bad_alloc.
    template <class T>
    T* take(int64_t count) {
        const size_t bytes = static_cast<size_t>(count) * sizeof(T);
        if (bytes > bytes_) {
            release();
            data_ = ::operator new(bytes, kLine);
            bytes_ = bytes;
        }
        return static_cast<T*>(data_);
    }

   private:
    static constexpr std::align_val_t kLine{64};

    void release() {
        if (data_ != nullptr) ::operator delete(data_, kLine);
        data_ = nullptr;
        bytes_ = 0;
    }

    void* data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace asyncmoe
