// Attributes of Python objects whose classes have `__slots__`, without looking them up.
#pragma once

#include <string>
#include <utility>

#include "names.h"

#include <structmember.h>  // wants to stand behind Python.h

namespace columns {

// Where instances of a class keep one attribute, which holds for those of its subclasses too.
class Member {
  public:
    // Raises TypeError if the class has no such slot.
    Member(py::handle type, const char* name) {
        const py::object found = type.attr(name);
        if (!Py_IS_TYPE(found.ptr(), &PyMemberDescr_Type)) {
            throw py::type_error(std::string(name) + " is no slot");
        }
        name_ = name;
        offset_ = reinterpret_cast<PyMemberDescrObject*>(found.ptr())->d_member->offset;
    }

    // Borrowed. Raises AttributeError if nothing is there.
    PyObject* of(PyObject* object) const {
        PyObject* value = place(object);
        if (value == nullptr) {
            PyErr_SetString(PyExc_AttributeError, name_);
            throw py::error_already_set();
        }
        return value;
    }

    void set(PyObject* object, py::object value) const {
        PyObject* const before = place(object);
        place(object) = value.release().ptr();
        Py_XDECREF(before);
    }

    void set(PyObject* object, PyObject* value) const {
        set(object, py::reinterpret_borrow<py::object>(value));
    }

  private:
    PyObject*& place(PyObject* object) const {
        return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
    }

    const char* name_;
    Py_ssize_t offset_;
};

// The members of the classes that stand for a parcel on its way.
struct Members {
    struct {
        Member kind, stage, count, pairs, block, payload, credits, described;
    } parcel;
    struct {
        Member source_free, error, callback;
    } posted;
    struct {
        Member source, parcel, release;
    } arrival;
};

// Looked up on first use, and kept for the life of the process.
const Members& members();

}  // namespace columns
