// A C++ closure as a Python callable: one object, called without a detour.
#pragma once

#include <cstddef>
#include <new>
#include <utility>

#include "view.h"

#include <structmember.h>  // wants to stand behind Python.h

namespace columns {

// `Body` is called as `py::object body(PyObject* const* arguments)` with exactly `Count` of them.
template <size_t Count, typename Body>
class Function {
  public:
    static py::object make(Body body) {
        auto* object = reinterpret_cast<Object*>(type()->tp_alloc(type(), 0));
        if (object == nullptr) throw py::error_already_set();
        object->vectorcall = &called;
        new (&object->body) Body(std::move(body));
        return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
    }

    // The body of such a callable; null if the object is something else.
    static const Body* of(py::handle object) {
        return Py_IS_TYPE(object.ptr(), type()) ? &reinterpret_cast<Object*>(object.ptr())->body
                                                : nullptr;
    }

  private:
    struct Object {
        PyObject_HEAD
        vectorcallfunc vectorcall;
        Body body;
    };

    static PyObject* called(PyObject* self, PyObject* const* arguments, size_t flags,
                            PyObject* names) {
        const bool named = names != nullptr && PyTuple_GET_SIZE(names) != 0;
        if (named || PyVectorcall_NARGS(flags) != Count) {
            PyErr_Format(PyExc_TypeError, "this takes %zu positional arguments", Count);
            return nullptr;
        }
        try {
            return reinterpret_cast<Object*>(self)->body(arguments).release().ptr();
        } catch (py::error_already_set& error) {
            error.restore();
        } catch (const py::builtin_exception& error) {
            error.set_error();
        } catch (const std::exception& error) {
            PyErr_SetString(PyExc_RuntimeError, error.what());
        }
        return nullptr;
    }

    static void deallocate(PyObject* self) {
        PyTypeObject* type = Py_TYPE(self);
        reinterpret_cast<Object*>(self)->body.~Body();
        type->tp_free(self);
        Py_DECREF(type);
    }

    static PyTypeObject* type() {
        static PyTypeObject* const made = make_type();
        return made;
    }

    static PyTypeObject* make_type() {
        static PyMemberDef members[] = {
            {"__vectorcalloffset__", T_PYSSIZET, offsetof(Object, vectorcall), READONLY, nullptr},
            {nullptr, 0, 0, 0, nullptr},
        };
        static PyType_Slot slots[] = {
            {Py_tp_dealloc, reinterpret_cast<void*>(&deallocate)},
            {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
            {Py_tp_members, members},
            {0, nullptr},
        };
        static PyType_Spec spec = {"asyncmoe.native._columns.Function", sizeof(Object), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
        PyObject* const type = PyType_FromSpec(&spec);
        if (type == nullptr) throw py::error_already_set();
        return reinterpret_cast<PyTypeObject*>(type);
    }
};

template <size_t Count, typename Body>
py::object function(Body body) {
    return Function<Count, Body>::make(std::move(body));
}

// A function of a key and one more argument: what `table` has for the key is called with the other,
// or `otherwise` with both.
struct ByKey {
    py::object operator()(PyObject* const* arguments) const;

    py::dict table;
    py::object otherwise;
};

py::object by_key(py::dict table, py::object otherwise);

}  // namespace columns
