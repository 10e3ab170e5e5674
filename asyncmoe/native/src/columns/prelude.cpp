// Preludes as bytes, and which of them are allowed. Why one is not is said by asyncmoe/wire.py.
#include "prelude.h"

#include <algorithm>
#include <cstring>

#include "checksum.h"

namespace columns {
namespace {

constexpr uint8_t kMagic[4] = {'a', 'M', 'o', 'E'};
constexpr uint8_t kVersion = 1;
constexpr uint8_t kItemBytes[kDtypes + 1] = {0, 4, 2, 2, 1, 1, 4, 8};
constexpr uint64_t kMostFanout = 255;
static_assert(kChecksummedBytes + sizeof(uint32_t) == kPreludeBytes);

}  // namespace

Limits::Limits(py::handle limits) {
    const auto number = [&](const char* name) {
        const py::object value = limits.attr(name);
        return value.is_none() ? int64_t{-1} : value.cast<int64_t>();
    };
    const auto bound = [&](const char* name) {
        return static_cast<uint64_t>(std::max<int64_t>(0, number(name)));
    };
    parcel_bytes = bound("parcel_bytes");
    parcel_rows = bound("parcel_rows");
    stages = bound("stages");
    message_bytes = bound("message_bytes");
    hidden = number("hidden");
    experts = number("experts");
}

uint64_t item_bytes(uint8_t dtype) { return kItemBytes[dtype]; }

// All fields are below 2^32 but payload_bytes, which is compared first: nothing here overflows.
bool allowed_parcel(const Prelude& p, const Limits& limits) {
    if (p.kind != kParcel) return false;
    if (p.parcel_class != kDispatch && p.parcel_class != kCombine) return false;
    if (p.stage >= limits.stages || p.dtype < 1 || p.dtype > kDtypes) return false;
    if (p.rows > limits.parcel_rows || p.payload_bytes > limits.parcel_bytes) return false;
    if (limits.hidden >= 0 && p.hidden != static_cast<uint64_t>(limits.hidden)) return false;
    const uint64_t row_bytes = uint64_t{p.hidden} * kItemBytes[p.dtype];
    if (row_bytes > limits.parcel_bytes || p.payload_bytes != p.rows * row_bytes) return false;
    const uint64_t rows = p.rows, pairs = p.pairs;
    uint64_t column_bytes = 9 * rows;
    if (p.parcel_class == kDispatch) {
        if (pairs < rows || pairs > kMostFanout * rows || p.credits) return false;
        column_bytes += 7 * pairs;
    } else if (pairs) {
        return false;
    }
    return p.credits <= limits.parcel_rows && p.column_bytes == column_bytes &&
           column_bytes <= limits.parcel_bytes;
}

bool allowed_control(const Prelude& p, const Limits& limits) {
    if (p.dtype | p.stage | p.lease | p.generation | p.pairs | p.hidden | p.credits |
        p.column_bytes) {
        return false;
    }
    const bool counts = p.kind == kTaken;
    if (counts ? (p.parcel_class != kDispatch && p.parcel_class != kCombine) || p.rows == 0
               : p.parcel_class != kControl || p.rows != 0) {
        return false;
    }
    if (p.kind == kMessage) return p.payload_bytes <= limits.message_bytes;
    const bool known = counts || p.kind == kHeartbeat || p.kind == kGoodbye || p.kind == kNotice;
    return known && p.sequence == 0 && p.payload_bytes == 0;
}

void write_prelude(const Prelude& p, uint8_t* out) {
    std::memcpy(out, kMagic, sizeof kMagic);
    out[4] = kVersion;
    each_field(p, [&](auto& field, int at) { std::memcpy(out + at, &field, sizeof field); });
    const uint32_t crc = checksum(out);
    std::memcpy(out + kChecksummedBytes, &crc, sizeof crc);
}

bool read_prelude(const uint8_t* in, Prelude* p) {
    uint32_t stated;
    std::memcpy(&stated, in + kChecksummedBytes, sizeof stated);
    each_field(*p, [&](auto& field, int at) { std::memcpy(&field, in + at, sizeof field); });
    return std::memcmp(in, kMagic, sizeof kMagic) == 0 && in[4] == kVersion &&
           stated == checksum(in);
}

}  // namespace columns
