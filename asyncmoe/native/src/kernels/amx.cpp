#include "amx.h"

#if defined(ASYNCMOE_HAS_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace asyncmoe {
namespace {

bool cpu_has_tiles() {
    constexpr unsigned kSavesState = 1u << 27;                  // leaf 1, ecx: OSXSAVE
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;      // leaf 7, edx
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kSavesState) == 0) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBf16) != 0 && (d & kTile) != 0;
}

// Whether the system saves tiles when it switches threads.
bool system_saves_tiles() {
    constexpr unsigned kTileState = 3u << 17;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & kTileState) == kTileState;
}

// Tiles make the state of a thread so much larger that Linux wants to be asked, once per process.
bool system_permits_tiles() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool amx_usable() { return cpu_has_tiles() && system_saves_tiles() && system_permits_tiles(); }

}  // namespace asyncmoe
#else
bool asyncmoe::amx_usable() { return false; }
#endif
