// Which instruction set the kernels use: found out at run time, and changed by tests alone.
//
// A kernel's templated source is compiled once per instruction set, each in a namespace of its own
// (`each_isa.h`), and its entry point calls the one that `isa()` names. Within one process all
// calls take the same one, so that results do not depend on who computes them.
#pragma once

#include <atomic>

#include "amx.h"
#include "packed.h"

namespace asyncmoe {

// Each has what those before it have.
enum class Isa { plain, avx2, avx512, avx512_bf16, amx_bf16 };

// The best one that this CPU has.
inline Isa best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        if (!__builtin_cpu_supports("avx512bf16")) return Isa::avx512;
        return amx_usable() ? Isa::amx_bf16 : Isa::avx512_bf16;
    }
    if (avx2) return Isa::avx2;
#endif
    return Isa::plain;
}

// The one in use.
inline std::atomic<Isa>& isa_in_use() {
    static std::atomic<Isa> isa{best_isa()};
    return isa;
}

inline Isa isa() { return isa_in_use().load(std::memory_order_relaxed); }

// The one for products with weights of this storage: only those of bfloat16 have better ones than
// AVX-512.
inline Isa product_isa(Storage storage) {
    const Isa best = isa();
    return best > Isa::avx512 && storage != Storage::bfloat16 ? Isa::avx512 : best;
}

}  // namespace asyncmoe

// Calls `name(arguments)` of the namespace of the instruction set in use.
#if defined(__x86_64__)
#define ASYNCMOE_ON_ISA(name, ...)                                          \
    (::asyncmoe::isa() >= ::asyncmoe::Isa::avx512 ? avx512::name(__VA_ARGS__) \
     : ::asyncmoe::isa() == ::asyncmoe::Isa::avx2 ? avx2::name(__VA_ARGS__)   \
                                                  : plain::name(__VA_ARGS__))
#else
#define ASYNCMOE_ON_ISA(name, ...) plain::name(__VA_ARGS__)
#endif

// The same for products with weights of this storage.
#if defined(ASYNCMOE_HAS_AMX)
#define ASYNCMOE_ON_AMX(name, ...) amx_bf16::name(__VA_ARGS__)
#else
#define ASYNCMOE_ON_AMX(name, ...) avx512_bf16::name(__VA_ARGS__)  // is never called
#endif
#if defined(__x86_64__)
#define ASYNCMOE_ON_PRODUCT_ISA(storage, name, ...)                          \
    (::asyncmoe::product_isa(storage) == ::asyncmoe::Isa::amx_bf16           \
         ? ASYNCMOE_ON_AMX(name, __VA_ARGS__)                                \
     : ::asyncmoe::product_isa(storage) == ::asyncmoe::Isa::avx512_bf16      \
         ? avx512_bf16::name(__VA_ARGS__)                                    \
         : ASYNCMOE_ON_ISA(name, __VA_ARGS__))
#else
#define ASYNCMOE_ON_PRODUCT_ISA(storage, name, ...) ASYNCMOE_ON_ISA(name, __VA_ARGS__)
#endif
