// Whether bfloat16 products may use the matrix tiles of Intel CPUs (AMX).
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && __GNUC__ >= 11
#define ASYNCMOE_HAS_AMX 1  // GCC that is as new as this comes with an assembler that knows them
#endif

namespace asyncmoe {

// Whether the CPU has tiles and the system lets this process use them, for which it is asked.
bool amx_usable();

}  // namespace asyncmoe
