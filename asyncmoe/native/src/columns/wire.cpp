// Frames: the prelude and its checks. What is not allowed is left to the caller, who says why.
#include "wire.h"

#include <algorithm>

#include "block.h"

namespace columns {
namespace {

constexpr uint8_t kMagic[4] = {'a', 'M', 'o', 'E'};
constexpr uint8_t kVersion = 1;
constexpr uint8_t kParcel = 1;
constexpr uint8_t kDispatch = 1;
constexpr uint8_t kCombine = 2;
constexpr int64_t kItemBytes[] = {0, 4, 2, 2, 1, 1, 4, 8};  // by dtype code
constexpr int64_t kMostFanout = 255;
constexpr int64_t kMostExpert = 65535;
constexpr py::ssize_t kHeadBytes = 60;
constexpr py::ssize_t kPreludeBytes = 64;

// CRC-32 of zlib by half bytes: a table of one cache line, which is enough for 60 bytes.
uint32_t checksum(const uint8_t* data, py::ssize_t size) {
    static constexpr uint32_t table[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
        0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
        0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    uint32_t crc = 0xffffffff;
    for (py::ssize_t i = 0; i < size; ++i) {
        crc ^= data[i];
        crc = table[crc & 15] ^ (crc >> 4);
        crc = table[crc & 15] ^ (crc >> 4);
    }
    return ~crc;
}

struct Limits {
    uint64_t parcel_bytes, parcel_rows, stages;
    int64_t hidden;  // -1: any
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

// All fields are below 2^32 but payload_bytes, which is compared first: nothing here overflows.
bool allowed(const Prelude& p, const Limits& limits) {
    if (p.kind != kParcel) return false;
    if (p.parcel_class != kDispatch && p.parcel_class != kCombine) return false;
    if (p.stage >= limits.stages || p.dtype < 1 || p.dtype > 7) return false;
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

template <typename T>
bool fits(py::handle value, T& field) {
    const unsigned long long number = PyLong_AsUnsignedLongLong(value.ptr());
    if (number == ~0ull && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    field = static_cast<T>(number);
    return field == number;
}

// The bounds in a `Limits` of asyncmoe/transport.py.
Limits read(py::handle limits) {
    static PyObject* const names[] = {
        PyUnicode_InternFromString("parcel_bytes"), PyUnicode_InternFromString("parcel_rows"),
        PyUnicode_InternFromString("stages"), PyUnicode_InternFromString("hidden")};
    int64_t values[4];
    for (int i = 0; i < 4; ++i) {
        const auto value = py::reinterpret_steal<py::object>(
            PyObject_GetAttr(limits.ptr(), names[i]));
        if (!value) throw py::error_already_set();
        values[i] = value.is_none() ? -1 : PyLong_AsLongLong(value.ptr());
        if (PyErr_Occurred()) throw py::error_already_set();
    }
    const auto bound = [&](int i) { return static_cast<uint64_t>(std::max<int64_t>(0, values[i])); };
    return {bound(0), bound(1), bound(2), values[3]};
}

}  // namespace

py::object encode_parcel(const py::tuple& fields, py::handle of, py::handle block) {
    const Limits limits = read(of);
    Prelude p{};
    bool whole = fields.size() == 14;
    py::ssize_t next = 0;
    each_field(p, [&](auto& field, int) { whole = whole && fits(fields[next++], field); });
    const Bytes columns(block);
    if (!whole || !allowed(p, limits) || columns.size() != p.column_bytes) return py::none();
    uint8_t* out;
    py::bytes frame = new_bytes(kPreludeBytes + columns.size(), &out);
    std::memcpy(out, kMagic, sizeof kMagic);
    out[4] = kVersion;
    each_field(p, [&](auto& field, int at) { std::memcpy(out + at, &field, sizeof field); });
    const uint32_t crc = checksum(out, kHeadBytes);
    std::memcpy(out + kHeadBytes, &crc, sizeof crc);
    std::memcpy(out + kPreludeBytes, columns.data(), columns.size());
    return frame;
}

py::object decode_parcel(py::handle data, py::handle of) {
    const Limits limits = read(of);
    const Bytes bytes(data);
    const uint8_t* in = bytes.data();
    if (bytes.size() != kPreludeBytes || std::memcmp(in, kMagic, sizeof kMagic) != 0 ||
        in[4] != kVersion) {
        return py::none();
    }
    uint32_t stated;
    std::memcpy(&stated, in + kHeadBytes, sizeof stated);
    Prelude p;
    each_field(p, [&](auto& field, int at) { std::memcpy(&field, in + at, sizeof field); });
    if (stated != checksum(in, kHeadBytes) || !allowed(p, limits)) return py::none();
    py::tuple fields(14);
    py::ssize_t next = 0;
    each_field(p, [&](auto& field, int) {
        PyTuple_SET_ITEM(fields.ptr(), next++, PyLong_FromUnsignedLongLong(field));
    });
    return fields;
}

bool check_columns(py::handle block, py::ssize_t rows, py::ssize_t pairs, int64_t experts) {
    const Bytes bytes(block);
    if (!is_dispatch(bytes.size(), rows, pairs)) return false;
    const Dispatch<const uint8_t> columns(bytes.data(), rows, pairs);
    int64_t total = 0;
    bool any_empty = false;
    for (py::ssize_t i = 0; i < rows; ++i) {
        const uint8_t fanout = columns.fanout[i];
        total += fanout;
        any_empty |= fanout == 0;
    }
    if (total != pairs || any_empty) return false;
    int64_t highest = 0;
    for (py::ssize_t i = 0; i < pairs; ++i) {
        highest = std::max<int64_t>(highest, columns.expert[i]);
    }
    return experts > kMostExpert || highest < experts;
}

bool all_local(py::handle block, py::ssize_t rows, py::ssize_t pairs, py::handle local) {
    const Bytes bytes(block);
    const auto index = column<int64_t>(local, "local");
    if (!is_dispatch(bytes.size(), rows, pairs)) return false;
    const Dispatch<const uint8_t> columns(bytes.data(), rows, pairs);
    for (py::ssize_t i = 0; i < pairs; ++i) {
        const py::ssize_t expert = columns.expert[i];
        if (expert >= index.size || index[expert] < 0) return false;
    }
    for (py::ssize_t i = 0; i < rows; ++i) {
        if (columns.fanout[i] == 0) return false;
    }
    return true;
}

}  // namespace columns
