// Seconds, for what is measured.
#pragma once

#include <chrono>

namespace asyncmoe {

inline double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

}  // namespace asyncmoe
