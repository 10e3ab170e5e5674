// A tensor's host memory as a memoryview: what torch needs four calls for.
#include "memory.h"

namespace columns {
namespace {

struct Exporter {
    PyObject_HEAD
    PyObject* owner;
    void* data;
    Py_ssize_t size;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    const auto* exporter = reinterpret_cast<Exporter*>(self);
    return PyBuffer_FillInfo(view, self, exporter->data, exporter->size, 0, flags);
}

void deallocate(PyObject* self) {
    Py_XDECREF(reinterpret_cast<Exporter*>(self)->owner);
    PyTypeObject* type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

PyTypeObject* exporter_type() {
    static PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
        {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
        {0, nullptr},
    };
    static PyType_Spec spec = {"asyncmoe.native._columns.Memory", sizeof(Exporter), 0,
                               Py_TPFLAGS_DEFAULT, slots};
    static PyObject* const type = PyType_FromSpec(&spec);
    if (type == nullptr) throw py::error_already_set();
    return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace

py::memoryview memory(py::handle owner, uintptr_t address, py::ssize_t size) {
    PyTypeObject* type = exporter_type();
    auto* exporter = PyObject_New(Exporter, type);
    if (exporter == nullptr) throw py::error_already_set();
    exporter->owner = owner.inc_ref().ptr();
    exporter->data = reinterpret_cast<void*>(address);
    exporter->size = size;
    const auto object = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(exporter));
    PyObject* view = PyMemoryView_FromObject(object.ptr());
    if (view == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::memoryview>(view);
}

}  // namespace columns
