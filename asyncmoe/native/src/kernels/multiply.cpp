#include <cstdint>

#include "bf16.h"
#include "packed.h"
#include "scratch.h"

namespace asyncmoe {
namespace {

// Of this thread, until the next call.
[[maybe_unused]] char* laid_rows_memory(int64_t bytes) {
    thread_local Scratch memory;
    return memory.take<char>(bytes);
}

}  // namespace
}  // namespace asyncmoe

#define ASYNCMOE_BF16_TOO
#define ASYNCMOE_SOURCE "multiply_any.isa.h"
#include "each_isa.h"
