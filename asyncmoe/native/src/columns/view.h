// Numpy arrays and buffers as plain memory, checked for type and shape before anything is read.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace columns {

namespace py = pybind11;

template <typename T>
constexpr char kind_of() {
    if (std::is_same<T, bool>::value) return 'b';
    if (std::is_floating_point<T>::value) return 'f';
    return std::is_signed<T>::value ? 'i' : 'u';
}

// A contiguous array of `dims` dimensions. Raises TypeError for anything else.
template <typename T>
py::array array_of(py::handle object, const char* name, py::ssize_t dims) {
    if (py::isinstance<py::array>(object)) {
        auto array = py::reinterpret_borrow<py::array>(object);
        const py::dtype type = array.dtype();
        if (type.kind() == kind_of<T>() && type.itemsize() == sizeof(T) && array.ndim() == dims &&
            (array.flags() & py::array::c_style)) {
            return array;
        }
    }
    throw py::type_error(std::string(name) + " is not a contiguous array of the right type");
}

// The elements of a one-dimensional array, which its owner keeps alive.
template <typename T>
struct Column {
    T* data;
    py::ssize_t size;

    T& operator[](py::ssize_t i) const { return data[i]; }

    // The element at an index that comes from other arrays. Raises IndexError.
    T& at(int64_t i, const char* name) const {
        if (i < 0 || i >= size) {
            throw py::index_error(std::string(name) + " has no index " + std::to_string(i));
        }
        return data[i];
    }
};

template <typename T>
Column<const T> column(py::handle object, const char* name) {
    const py::array array = array_of<T>(object, name, 1);
    return {static_cast<const T*>(array.data()), array.size()};
}

// The same, to be written to.
template <typename T>
Column<T> writable(py::handle object, const char* name) {
    py::array array = array_of<T>(object, name, 1);
    return {static_cast<T*>(array.mutable_data()), array.size()};  // raises if it is read-only
}

// Raises ValueError unless `size` is `expected`.
inline void check_size(py::ssize_t size, py::ssize_t expected, const char* name) {
    if (size != expected) {
        throw py::value_error(std::string(name) + " has " + std::to_string(size) +
                              " entries; expected " + std::to_string(expected));
    }
}

// A new array and its memory.
template <typename T>
struct Fresh {
    explicit Fresh(py::ssize_t size) : array(size), data(array.mutable_data()) {}
    Fresh(py::ssize_t rows, py::ssize_t width)
        : array({rows, width}), data(array.mutable_data()) {}

    T& operator[](py::ssize_t i) const { return data[i]; }

    py::array_t<T> array;
    T* data;
};

// The bytes of an object with the buffer protocol, held while this lives.
class Bytes {
  public:
    explicit Bytes(py::handle object, int flags = PyBUF_SIMPLE) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw py::error_already_set();
    }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    ~Bytes() { PyBuffer_Release(&view_); }

    const uint8_t* data() const { return static_cast<const uint8_t*>(view_.buf); }
    py::ssize_t size() const { return view_.len; }

  private:
    Py_buffer view_;
};

// A new `bytes` object of this length, and the memory to fill it.
inline py::bytes new_bytes(py::ssize_t size, uint8_t** data) {
    PyObject* bytes = PyBytes_FromStringAndSize(nullptr, size);
    if (bytes == nullptr) throw py::error_already_set();
    *data = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(bytes));
    return py::reinterpret_steal<py::bytes>(bytes);
}

}  // namespace columns
