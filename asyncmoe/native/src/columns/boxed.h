// Python types around C++ values, made with the C API: their methods are called without pybind11's
// detours, and the garbage collector can look into them.
#pragma once

#include <cstring>
#include <initializer_list>
#include <new>
#include <utility>
#include <vector>

#include "names.h"

namespace columns {

// `T` has `int visit(visitproc, void*)` over the objects that it owns, and `void clear()`, which
// lets them go.
template <typename T>
struct Boxed {
    PyObject_HEAD
    T value;

    inline static PyTypeObject* type = nullptr;
};

template <typename T>
T& unboxed(PyObject* object) {
    return reinterpret_cast<Boxed<T>*>(object)->value;
}

// An owned reference to a box, or to nothing.
template <typename T>
class Ref {
  public:
    Ref() = default;
    static Ref borrowed(PyObject* object) {
        return Ref(py::reinterpret_borrow<py::object>(object));
    }
    // The value if that is what the object holds. Raises TypeError.
    static Ref of(py::handle object) {
        if (!is(object)) throw py::type_error(std::string("no ") + Boxed<T>::type->tp_name);
        return borrowed(object.ptr());
    }
    static bool is(py::handle object) { return PyObject_TypeCheck(object.ptr(), Boxed<T>::type); }
    // A new one, default-made.
    static Ref make() {
        PyObject* made = Boxed<T>::type->tp_alloc(Boxed<T>::type, 0);
        if (made == nullptr) throw py::error_already_set();
        new (&unboxed<T>(made)) T();
        return Ref(py::reinterpret_steal<py::object>(made));
    }

    T* operator->() const { return &unboxed<T>(object_.ptr()); }
    T& operator*() const { return unboxed<T>(object_.ptr()); }
    T* get() const { return object_ ? &unboxed<T>(object_.ptr()) : nullptr; }
    explicit operator bool() const { return static_cast<bool>(object_); }
    PyObject* ptr() const { return object_.ptr(); }
    const py::object& object() const { return object_; }
    PyObject* release() { return object_.release().ptr(); }
    void reset() { py::object gone = std::move(object_); }

  private:
    explicit Ref(py::object object) : object_(std::move(object)) {}

    py::object object_;
};

// `body()`, which returns what Python gets; its exceptions become Python's.
template <typename F>
auto guarded(F body) noexcept -> decltype(body()) {
    using Result = decltype(body());
    try {
        return body();
    } catch (py::error_already_set& error) {
        error.restore();
    } catch (const py::builtin_exception& error) {
        error.set_error();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    if constexpr (std::is_pointer<Result>::value) return nullptr;
    else return -1;
}

// Attributes of a type.
template <typename T, double T::*Member>
PyObject* get_number(PyObject* self, void*) {
    return PyFloat_FromDouble(unboxed<T>(self).*Member);
}

template <typename T, double T::*Member>
int set_number(PyObject* self, PyObject* value, void*) {
    const double number = value == nullptr ? 0 : PyFloat_AsDouble(value);
    if (value == nullptr || (number == -1 && PyErr_Occurred())) {
        if (value == nullptr) PyErr_SetString(PyExc_AttributeError, "it cannot be deleted");
        return -1;
    }
    unboxed<T>(self).*Member = number;
    return 0;
}

template <typename T, bool T::*Member>
PyObject* get_flag(PyObject* self, void*) {
    return PyBool_FromLong(unboxed<T>(self).*Member);
}

template <typename T, bool T::*Member>
int set_flag(PyObject* self, PyObject* value, void*) {
    const int flag = value == nullptr ? 0 : PyObject_IsTrue(value);
    if (flag < 0) return -1;
    unboxed<T>(self).*Member = flag != 0;
    return 0;
}

template <typename T, py::object T::*Member>
PyObject* get_object(PyObject* self, void*) {
    const py::object& object = unboxed<T>(self).*Member;
    return (object ? object : py::none()).inc_ref().ptr();
}

template <typename T, py::object T::*Member>
int set_object(PyObject* self, PyObject* value, void*) {
    const py::object gone = std::move(unboxed<T>(self).*Member);
    if (value == nullptr) value = Py_None;
    unboxed<T>(self).*Member = py::reinterpret_borrow<py::object>(value);
    return 0;
}

template <typename T>
struct BoxSlots {
    static PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
        PyObject* made = type->tp_alloc(type, 0);
        if (made != nullptr) new (&unboxed<T>(made)) T();
        return made;
    }
    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        return unboxed<T>(self).visit(visit, arg);
    }
    static int clear(PyObject* self) {
        unboxed<T>(self).clear();
        return 0;
    }
    static void dealloc(PyObject* self) {
        PyTypeObject* type = Py_TYPE(self);
        PyObject_GC_UnTrack(self);
        unboxed<T>(self).~T();
        type->tp_free(self);
        Py_DECREF(type);
    }
};

// Makes the type and adds it to the module under the last part of its name. `more`: slots beside
// those of memory; `flags`: beside the usual ones.
template <typename T>
void add_box(py::module_& m, const char* name, std::initializer_list<PyType_Slot> more,
             unsigned int flags = 0, bool is_made_by_python = false) {
    std::vector<PyType_Slot> slots(more);
    slots.push_back({Py_tp_traverse, reinterpret_cast<void*>(&BoxSlots<T>::traverse)});
    slots.push_back({Py_tp_clear, reinterpret_cast<void*>(&BoxSlots<T>::clear)});
    slots.push_back({Py_tp_dealloc, reinterpret_cast<void*>(&BoxSlots<T>::dealloc)});
    if (is_made_by_python) {
        slots.push_back({Py_tp_new, reinterpret_cast<void*>(&BoxSlots<T>::make)});
    } else {
        flags |= Py_TPFLAGS_DISALLOW_INSTANTIATION;
    }
    slots.push_back({0, nullptr});
    PyType_Spec spec{name, sizeof(Boxed<T>), 0, static_cast<unsigned int>(
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | flags), slots.data()};
    PyObject* type = PyType_FromSpec(&spec);
    if (type == nullptr) throw py::error_already_set();
    Boxed<T>::type = reinterpret_cast<PyTypeObject*>(type);
    m.attr(std::strrchr(name, '.') + 1) = py::reinterpret_steal<py::object>(type).inc_ref();
}

}  // namespace columns
