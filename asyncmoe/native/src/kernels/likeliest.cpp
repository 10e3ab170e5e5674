#include "likeliest.h"

#include <cstring>

#include "bf16.h"
#include "isa.h"

#define ASYNCMOE_SOURCE "likeliest.isa.h"
#include "each_isa.h"

namespace asyncmoe {

int64_t likeliest(const float* x, int64_t count) {
    return ASYNCMOE_ON_ISA(likeliest_on_isa, x, count);
}

}  // namespace asyncmoe
