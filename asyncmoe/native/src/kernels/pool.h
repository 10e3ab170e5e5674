// The threads that share one kernel: a small pool that belongs to the thread that calls kernels.
//
// Kernels of a decode step last tens of microseconds and follow each other within a few, so that
// workers spin for a moment before they sleep. Each compute thread has a pool of its own (several
// ranks may live in one process), made by `Pool::resize` and ended with its thread.
#pragma once

#include <atomic>
#include <condition_variable>
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
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        ending_ = false;
        const unsigned seen = generation_.load();
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
        busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
        // Sequentially consistent with `sleepers_`: either a worker sees the new generation before
        // it sleeps, or this thread sees that it sleeps.
        generation_.fetch_add(1);
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> guard(mutex_);
            wake_.notify_all();
        }
        take();
        for (int spins = 0; busy_.load(std::memory_order_acquire) > 0; ++spins) {
            if (spins < kSpins) cpu_relax();
            else std::this_thread::yield();
        }
    }

   private:
    static constexpr int kSpins = 2000;  // some tens of microseconds

    void take() {
        for (int task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;)
            call_(context_, task);
    }

    void work(unsigned seen) {
        for (;;) {
            for (int spins = 0; generation_.load(std::memory_order_acquire) == seen; ++spins) {
                if (spins < kSpins) {
                    cpu_relax();
                    continue;
                }
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1);
                wake_.wait(lock, [&] { return generation_.load() != seen; });
                sleepers_.fetch_sub(1);
            }
            if (ending_) return;
            seen = generation_.load(std::memory_order_acquire);
            take();
            busy_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<unsigned> generation_{0};
    std::atomic<int> next_{0}, busy_{0}, sleepers_{0};
    void (*call_)(const void*, int) = nullptr;
    const void* context_ = nullptr;
    int tasks_ = 0;
    bool ending_ = false;
};

}  // namespace asyncmoe
