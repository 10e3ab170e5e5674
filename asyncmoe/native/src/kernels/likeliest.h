// The largest of many numbers, as numpy's argmax finds it.
#pragma once

#include <cstdint>

namespace asyncmoe {

// The place of the first of the largest of x [count], of which there is at least one; -1 if that
// is infinite or any is NaN.
int64_t likeliest(const float* x, int64_t count);

}  // namespace asyncmoe
