// Compiles the file named by ASYNCMOE_SOURCE once per instruction set, in the namespaces
// asyncmoe::plain, ::avx2, ::avx512 and, if asked for, ::avx512_bf16 and ::amx_bf16, where `kWidth`
// is the number of floats in a vector.
//
// Include all of the standard library before this file: its templates must not be instantiated for
// an instruction set that the CPU may lack. For the same reason lambdas that are handed to code
// outside (`Pool::run`) must do no more than call a function of the namespace: GCC compiles them
// for the baseline. ASYNCMOE_LEVEL is 0 to 4 like `Isa`, since the compiler's own macros
// (__AVX2__) do not follow the pragma.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "amx.h"

#define ASYNCMOE_INLINE inline __attribute__((always_inline))

namespace asyncmoe {
namespace plain {
constexpr int kWidth = 8;  // two registers of the baseline's four
#define ASYNCMOE_LEVEL 0
#include ASYNCMOE_SOURCE
#undef ASYNCMOE_LEVEL
}  // namespace plain

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr int kWidth = 8;
#define ASYNCMOE_LEVEL 1
#include ASYNCMOE_SOURCE
#undef ASYNCMOE_LEVEL
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
namespace avx512 {
constexpr int kWidth = 16;
#define ASYNCMOE_LEVEL 2
#include ASYNCMOE_SOURCE
#undef ASYNCMOE_LEVEL
}  // namespace avx512
#pragma GCC pop_options

#if defined(ASYNCMOE_BF16_TOO)  // by sources that gain from multiplying bfloat16 numbers
#pragma GCC push_options
#pragma GCC target( \
    "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
namespace avx512_bf16 {
constexpr int kWidth = 16;
#define ASYNCMOE_LEVEL 3
#include ASYNCMOE_SOURCE
#undef ASYNCMOE_LEVEL
}  // namespace avx512_bf16

#if defined(ASYNCMOE_HAS_AMX)
namespace amx_bf16 {
constexpr int kWidth = 16;
#define ASYNCMOE_LEVEL 4
#include ASYNCMOE_SOURCE
#undef ASYNCMOE_LEVEL
}  // namespace amx_bf16
#endif
#pragma GCC pop_options
#endif
#endif
}  // namespace asyncmoe

#undef ASYNCMOE_SOURCE
