// Packed parcels (asyncmoe/packed.py) as compiled code reads and makes them.
#pragma once

#include <unordered_set>
#include <vector>

#include "names.h"
#include "tensor.h"

namespace columns {

// What a packed parcel says of itself.
struct PackedView {
    // Takes any parcel, which is packed if it is not. Raises what `pack` raises.
    explicit PackedView(py::handle parcel);
    // One that no Python object stands for yet.
    PackedView(const Prelude& head, py::object columns, py::object rows_of_it);
    // Combine rows of an expert stage that no Python object stands for yet.
    PackedView(int64_t stage, int64_t rows, py::object columns, py::object rows_of_it,
               int64_t credits, const TensorRows& described);

    // The Python object; made if there was none.
    py::object object() const;

    py::object packed, block, payload;  // `packed` may be null
    int64_t kind, stage, rows, pairs, credits;
    TensorRows described{};  // the payload; dtype 0: it was not described
};

// Whether a parcel is packed already.
bool is_packed(py::handle parcel);

// Slot and epoch as one number.
inline uint64_t row_key(uint32_t slot, uint32_t epoch) { return uint64_t{slot} << 32 | epoch; }

// The rows of a dispatch parcel that are not among the dead.
std::vector<int64_t> alive_rows(const PackedView& parcel, const std::unordered_set<uint64_t>& dead);

// These rows of a dispatch parcel.
py::object select(const PackedView& parcel, const std::vector<int64_t>& rows);

// A new packed parcel; `kind`: kDispatch or kCombine.
py::object make_parcel(int kind, int64_t stage, int64_t rows, int64_t pairs, py::handle block,
                       py::handle payload, int64_t credits, const py::object& described);

// A method of a tensor (or another object) with these arguments.
template <typename... Arguments>
py::object call_method(py::handle object, PyObject* name, Arguments... arguments) {
    PyObject* of[] = {nullptr, object.ptr(), arguments.ptr()...};
    PyObject* result = PyObject_VectorcallMethod(
        name, of + 1, (1 + sizeof...(Arguments)) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
}

}  // namespace columns
