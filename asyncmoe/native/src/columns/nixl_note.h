// Notifications between two NIXL ranks, see transports/nixl_wire.py. They stand little-endian.
#pragma once

#include <cstring>
#include <string>

#include "names.h"

namespace columns {

constexpr py::ssize_t kNoteHeadBytes = 7;

// Both are read and written field by field, since they stand without gaps.
struct Written {
    uint8_t kind;
    uint32_t nbytes;
    uint64_t sequence;

    static constexpr uint8_t kNoteKind = 2;
    static constexpr py::ssize_t kBytes = 13;

    static Written read(const uint8_t* in) {
        Written entry{in[0], 0, 0};
        std::memcpy(&entry.nbytes, in + 1, sizeof entry.nbytes);
        std::memcpy(&entry.sequence, in + 5, sizeof entry.sequence);
        return entry;
    }
    void write(uint8_t* out) const {
        out[0] = kind;
        std::memcpy(out + 1, &nbytes, sizeof nbytes);
        std::memcpy(out + 5, &sequence, sizeof sequence);
    }
};

struct Freed {
    uint8_t kind;
    uint32_t first, generation;

    static constexpr uint8_t kNoteKind = 3;
    static constexpr py::ssize_t kBytes = 9;

    static Freed read(const uint8_t* in) {
        Freed entry{in[0], 0, 0};
        std::memcpy(&entry.first, in + 1, sizeof entry.first);
        std::memcpy(&entry.generation, in + 5, sizeof entry.generation);
        return entry;
    }
    void write(uint8_t* out) const {
        out[0] = kind;
        std::memcpy(out + 1, &first, sizeof first);
        std::memcpy(out + 5, &generation, sizeof generation);
    }
};

// A notification of the pair's `generation`.
template <typename Entry, typename Entries>
py::bytes encode_note(uint32_t generation, const Entries& entries) {
    uint8_t* out;
    py::bytes note = new_bytes(
        kNoteHeadBytes + static_cast<py::ssize_t>(entries.size()) * Entry::kBytes, &out);
    out[0] = 'a';
    out[1] = 'N';
    out[2] = Entry::kNoteKind;
    std::memcpy(out + 3, &generation, sizeof generation);
    out += kNoteHeadBytes;
    for (const Entry& entry : entries) {
        entry.write(out);
        out += Entry::kBytes;
    }
    return note;
}

// Calls `use(entry)` for each entry. Raises ProtocolError, before any, if one is not allowed.
template <typename Entry, typename F>
void each_entry(const py::bytes& note, F use) {
    const auto* data = reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(note.ptr()));
    const py::ssize_t size = PyBytes_GET_SIZE(note.ptr()) - kNoteHeadBytes;
    bool allowed = size > 0 && size % Entry::kBytes == 0 && data[2] == Entry::kNoteKind;
    data += kNoteHeadBytes;
    for (py::ssize_t at = 0; allowed && at < size; at += Entry::kBytes) {
        allowed = data[at] == kDispatch || data[at] == kCombine;
    }
    if (!allowed) {
        py::module_::import("asyncmoe.transports.nixl_wire").attr("decode_note")(note);
        throw py::value_error("a notification of another kind");
    }
    for (py::ssize_t at = 0; at < size; at += Entry::kBytes) use(Entry::read(data + at));
}

[[noreturn]] inline void refuse_protocol(const std::string& why) {
    PyErr_SetString(names().protocol_error, why.c_str());
    throw py::error_already_set();
}

}  // namespace columns
