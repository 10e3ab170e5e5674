// The threads that share one kernel: a small pool that belongs to the thread that calls kernels.
//
// Kernels of a decode step last tens of microseconds and follow each other within a few, so that
// workers spin for a moment before they sleep. A worker takes part in a call if it comes before the
// last task is given out; nobody waits for one that sleeps. Each compute thread has a pool of its
// own (several ranks may live in one process), made by `Pool::resize` and ended with its thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace asyncmoe {

inline void cpu_relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
   public:
    // The pool of the calling thread.
    static Pool& mine() {
        thread_local Pool pool;
        return pool;
    }

    ~Pool() { resize(1); }

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // `threads` counts the calling thread.
    void resize(int threads) {
        {
            std::lock_guard<std::mutex> guard(mutex_);
            ending_ = true;
            gate_.store(next_generation());
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        ending_ = false;
        const uint32_t seen = generation(gate_.load());
        for (int i = 1; i < threads; ++i) workers_.emplace_back([this, seen] { work(seen); });
    }

    // Calls body(task) for each task in [0, tasks), on all threads; returns when all are done.
    // Tasks must not depend on each other, so that who runs which has no influence on results.
    template <class Body>
    void run(int tasks, const Body& body) {
        if (tasks <= 1 || workers_.empty()) {
            for (int task = 0; task < tasks; ++task) body(task);
            return;
        }
        call_ = [](const void* context, int task) {
            (*static_cast<const Body*>(context))(task);
        };
        context_ = &body;
        tasks_ = tasks;
        next_.store(0, std::memory_order_relaxed);
        left_.store(0, std::memory_order_relaxed);
        // Sequentially consistent with `sleepers_`: either a worker sees the new generation before
        // it sleeps, or this thread sees that it sleeps.
        gate_.store(next_generation() | kOpen);
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> guard(mutex_);
            wake_.notify_all();
        }
        take();
        const auto joined = static_cast<uint32_t>(gate_.fetch_and(~kOpen)) & ~kOpenBit;
        for (int spins = 0; left_.load(std::memory_order_acquire) < joined; ++spins) {
            if (spins < kPatience) cpu_relax();
            else std::this_thread::yield();  // there may be fewer cores than threads
        }
    }

   private:
    // The gate of a call: its generation, whether workers may still join, and how many have.
    static constexpr uint32_t kOpenBit = 1u << 31;
    static constexpr uint64_t kOpen = kOpenBit;
    static constexpr std::chrono::microseconds kSpin{50};
    static constexpr int kPatience = 2000;

    static uint32_t generation(uint64_t gate) { return static_cast<uint32_t>(gate >> 32); }

    uint64_t next_generation() const { return uint64_t{generation(gate_.load()) + 1u} << 32; }

    void take() {
        for (int task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;)
            call_(context_, task);
    }

    // Whether this worker has become part of the call that is going on.
    bool join() {
        uint64_t gate = gate_.load();
        while (gate & kOpen)
            if (gate_.compare_exchange_weak(gate, gate + 1)) return true;
        return false;
    }

    void await_other_than(uint32_t seen) {
        const auto changed = [&] { return generation(gate_.load()) != seen; };
        const auto until = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < 32; ++i) {
                if (changed()) return;
                cpu_relax();
            }
        } while (std::chrono::steady_clock::now() < until);
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, changed);
        sleepers_.fetch_sub(1);
    }

    void work(uint32_t seen) {
        for (;;) {
            await_other_than(seen);
            if (ending_) return;
            seen = generation(gate_.load());
            if (!join()) continue;
            take();
            left_.fetch_add(1, std::memory_order_release);
        }
    }

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<uint64_t> gate_{0};
    std::atomic<int> next_{0}, sleepers_{0};
    std::atomic<uint32_t> left_{0};
    void (*call_)(const void*, int) = nullptr;
    const void* context_ = nullptr;
    int tasks_ = 0;
    std::atomic<bool> ending_{false};
};

}  // namespace asyncmoe
