// The element type `torch.bfloat16`: the upper half of a float.
#pragma once

#include <cstdint>

namespace asyncmoe {

struct Bf16 {
    uint16_t bits;
};

}  // namespace asyncmoe
