// Receive buffers and who owns them: the compiled twin of asyncmoe/lease.py, where the rules stand.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "names.h"

namespace columns {

enum class State : uint8_t { kFilling, kHeld, kQuarantined, kFree };

// Memory that is leased again and again.
class Block {
  public:
    Block(int64_t id, py::object tensor);

    // Its first bytes as [rows, hidden] of a dtype. A tensor costs more than all else that a parcel
    // needs, so those of many numbers of rows are kept.
    py::object rows(py::handle dtype, int64_t rows, int64_t hidden);

    const int64_t id;
    const py::object tensor;  // uint8 [size]
    uint8_t* const data;      // null if it is no host memory
    const int64_t size;
    uint32_t generation = 0;

  private:
    struct View {
        PyObject* dtype;
        int64_t rows, hidden;
        py::object tensor;
    };
    std::vector<View> views_;  // by rows, modulo their number
};

class Pool;

// Ownership of `nbytes` bytes. What moves it raises RuntimeError in the wrong state.
class Lease {
  public:
    using OnFree = std::function<void()>;

    Lease(std::shared_ptr<Pool> pool, std::shared_ptr<Block> block, int64_t nbytes, OnFree on_free);

    void arrived() { move(State::kFilling, State::kHeld); }
    void release() { move(State::kHeld, State::kFree); }
    void abandon() { move(State::kFilling, State::kQuarantined); }
    void quiet() { move(State::kQuarantined, State::kFree); }

    State state() const { return state_; }
    // Whether the memory is another's, who hears of the end.
    bool is_lent() const { return static_cast<bool>(on_free_); }
    Block& block() const { return *block_; }
    py::memoryview memory() const;

    const int64_t nbytes;
    const uint32_t generation;

  private:
    void move(State source, State target);

    const std::shared_ptr<Pool> pool_;
    const std::shared_ptr<Block> block_;
    OnFree on_free_;
    State state_ = State::kFilling;
};

// The buffers of one rank.
class Pool : public std::enable_shared_from_this<Pool> {
  public:
    Pool(int64_t idle_bytes, py::object allocate) : limit_(idle_bytes), allocate_(allocate) {}

    std::shared_ptr<Lease> obtain(int64_t nbytes);
    std::shared_ptr<Lease> adopt(py::object memory, py::object on_free);
    std::shared_ptr<Lease> lend(std::shared_ptr<Block> block, int64_t nbytes,
                                Lease::OnFree on_free);
    std::shared_ptr<Block> block(py::object memory);

    int64_t count(State state) const { return counts_[static_cast<int>(state)]; }
    int64_t live() const {
        return count(State::kFilling) + count(State::kHeld) + count(State::kQuarantined);
    }
    int64_t idle_bytes() const { return idle_bytes_; }

  private:
    friend class Lease;

    // A lease has changed its state; a free one's buffer is kept for the next if it is the pool's.
    void moved(State source, State target) {
        --counts_[static_cast<int>(source)];
        ++counts_[static_cast<int>(target)];
    }
    void reclaim(const std::shared_ptr<Block>& block, bool reuse);

    const int64_t limit_;
    const py::object allocate_;
    std::vector<std::shared_ptr<Block>> idle_[64];  // by the power of two that is their size
    int64_t counts_[4] = {};
    int64_t blocks_ = 0, idle_bytes_ = 0;
};

// What is to happen once memory was read for the last time.
class Release {
  public:
    // Nothing, as None says.
    Release() = default;
    explicit Release(py::object callback) {
        if (!callback.is_none()) callback_ = std::move(callback);
    }
    explicit Release(std::shared_ptr<Lease> lease) : lease_(std::move(lease)) {}

    explicit operator bool() const { return lease_ || callback_; }
    // Whether somebody may wait for it: not for memory of this rank's pool, which has more.
    bool is_awaited() const { return lease_ ? lease_->is_lent() : static_cast<bool>(callback_); }
    // Does it; afterwards there is nothing to do.
    void operator()();
    // As a Python callable without arguments, or None.
    py::object object() const;

    template <typename F>
    void each_reference(F& visit) {
        visit(callback_);
    }

  private:
    std::shared_ptr<Lease> lease_;
    py::object callback_;  // either, or none of both
};

void bind_lease(py::module_& m);

}  // namespace columns
