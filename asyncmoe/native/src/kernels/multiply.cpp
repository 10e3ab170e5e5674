#include <cstdint>

#include "bf16.h"
#include "packed.h"

#define ASYNCMOE_BF16_TOO
#define ASYNCMOE_SOURCE "multiply.isa.h"
#include "each_isa.h"
