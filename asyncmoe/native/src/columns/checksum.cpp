// Tables are out of the caches when a payload was copied in between, so a processor that multiplies
// without carries does that instead: V. Gopal et al., "Fast CRC Computation for Generic Polynomials
// Using PCLMULQDQ Instruction", Intel 2009, with its constants for this polynomial.
#include "checksum.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace columns {
namespace {

// Four bytes at a time.
struct Tables {
    uint32_t of[4][256];

    Tables() {
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t crc = i;
            for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320 : 0);
            of[0][i] = crc;
        }
        for (int t = 1; t < 4; ++t) {
            for (int i = 0; i < 256; ++i) {
                of[t][i] = of[0][of[t - 1][i] & 255] ^ (of[t - 1][i] >> 8);
            }
        }
    }
};

uint32_t by_tables(const uint8_t* data) {
    static const Tables tables;
    uint32_t crc = 0xffffffff;
    for (int i = 0; i < kChecksummedBytes; i += 4) {
        uint32_t word;
        std::memcpy(&word, data + i, sizeof word);
        crc ^= word;
        crc = tables.of[3][crc & 255] ^ tables.of[2][crc >> 8 & 255] ^
              tables.of[1][crc >> 16 & 255] ^ tables.of[0][crc >> 24];
    }
    return ~crc;
}

#if defined(__x86_64__)

__attribute__((target("pclmul,sse4.1"))) uint32_t by_products(const uint8_t* data) {
    const auto load = [](const void* at) __attribute__((target("pclmul,sse4.1"))) {
        return _mm_loadu_si128(static_cast<const __m128i*>(at));
    };
    // Four zero bytes in front change nothing; the start value stands in the four behind them.
    uint8_t front[16] = {};
    std::memcpy(front + 4, data, 12);
    for (int i = 4; i < 8; ++i) front[i] = ~front[i];
    const __m128i fold = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m128i rest = load(front);
    for (int at = 12; at < kChecksummedBytes; at += 16) {
        rest = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(rest, fold, 0x00),
                                           _mm_clmulepi64_si128(rest, fold, 0x11)),
                             load(data + at));
    }
    // From 128 bits to 64 and a half of them, then to the remainder.
    const __m128i low = _mm_setr_epi32(~0, 0, ~0, 0);
    rest = _mm_xor_si128(_mm_srli_si128(rest, 8), _mm_clmulepi64_si128(rest, fold, 0x10));
    rest = _mm_xor_si128(_mm_srli_si128(rest, 4),
                         _mm_clmulepi64_si128(_mm_and_si128(rest, low),
                                              _mm_set_epi64x(0, 0x163cd6124), 0x00));
    const __m128i divide = _mm_set_epi64x(0x1f7011641, 0x1db710641);
    __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(rest, low), divide, 0x10);
    quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low), divide, 0x00);
    return ~static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(rest, quotient), 1));
}

bool multiplies() {
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

#else

uint32_t by_products(const uint8_t* data) { return by_tables(data); }
bool multiplies() { return false; }

#endif

}  // namespace

uint32_t checksum(const uint8_t* data) {
    static const bool fast = multiplies();
    return fast ? by_products(data) : by_tables(data);
}

}  // namespace columns
