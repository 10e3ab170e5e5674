// The fixed head of a frame, see asyncmoe/wire.py. It stands little-endian, as the machines we run
// on.
#pragma once

#include "view.h"

namespace columns {

constexpr py::ssize_t kPreludeBytes = 64;

// Frame kinds and parcel classes.
constexpr uint8_t kParcel = 1, kMessage = 2, kHeartbeat = 3, kGoodbye = 4, kNotice = 6, kTaken = 7;
constexpr uint8_t kControl = 0, kDispatch = 1, kCombine = 2;
constexpr int kClasses = 3;
constexpr int kDtypes = 7;  // codes are 1 to 7

// The bounds in a `Limits` of asyncmoe/transport.py.
struct Limits {
    uint64_t parcel_bytes, parcel_rows, stages, message_bytes;
    int64_t hidden;  // -1: any
    int64_t experts;

    explicit Limits(py::handle limits);
};

// The fields of a prelude behind magic and version, in the order in which they stand.
struct Prelude {
    uint8_t kind, parcel_class, dtype;
    uint32_t stage, source;
    uint64_t sequence;
    uint32_t lease, generation, rows, pairs, hidden, credits, column_bytes;
    uint64_t payload_bytes;
};

// Calls `move(field, offset)` for each field.
template <typename P, typename F>
void each_field(P& p, F move) {
    move(p.kind, 5);
    move(p.parcel_class, 6);
    move(p.dtype, 7);
    move(p.stage, 8);
    move(p.source, 12);
    move(p.sequence, 16);
    move(p.lease, 24);
    move(p.generation, 28);
    move(p.rows, 32);
    move(p.pairs, 36);
    move(p.hidden, 40);
    move(p.credits, 44);
    move(p.column_bytes, 48);
    move(p.payload_bytes, 52);
}

// The size in bytes of an item of a dtype code.
uint64_t item_bytes(uint8_t dtype);

// Whether the limits allow a parcel's prelude, or one of another kind.
bool allowed_parcel(const Prelude& p, const Limits& limits);
bool allowed_control(const Prelude& p, const Limits& limits);

// 64 bytes with magic, version and checksum.
void write_prelude(const Prelude& p, uint8_t* out);

// Whether these 64 bytes are a prelude whose checksum is right; its fields are not checked.
bool read_prelude(const uint8_t* in, Prelude* p);

}  // namespace columns
