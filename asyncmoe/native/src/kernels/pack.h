// Weights into panels, see `packed.h`.
#pragma once

#include <cstdint>

#include "packed.h"

namespace asyncmoe {

// weight [columns, inputs] of float, Bf16 or int8_t, as `storage` says -> panels at `out`. Panel i
// of the weight becomes panel first + i * step of `out`, so that two weights can alternate.
void pack(const void* weight, int64_t columns, int64_t inputs, Storage storage, void* out,
          int64_t first, int64_t step);

}  // namespace asyncmoe
