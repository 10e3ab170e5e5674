#include "nixl_library.h"

namespace columns {

py::object NixlLibrary::write(const py::object& peer, const NixlBatch& batch) const {
    const py::object local = call(places_, memory_, batch.local());
    const py::object remote = call(places_, memory_, batch.remote());
    const py::object handle =
        call(create_, operation_, local, remote, peer, batch.note, no_backends_);
    py::object trouble = py::none();
    try {
        const py::object state = call(post_, handle, no_note_);
        if (state.equal(done_) && let_go(handle)) return py::none();
        if (!state.equal(done_) && !state.equal(under_way_)) trouble = state;
    } catch (py::error_already_set& error) {
        trouble = error.value();
    }
    return py::make_tuple(handle, trouble);
}

bool NixlLibrary::let_go(const py::object& handle) const {
    try {
        call(release_, handle);
        return true;
    } catch (py::error_already_set&) {
        return false;  // whoever looks at it next tries again
    }
}

void bind_nixl_library(py::module_& m) {
    py::class_<NixlLibrary>(m, "NixlLibrary")
        .def(py::init<py::object, py::object, py::object, py::object, py::object, py::object>())
        .def("write", &NixlLibrary::write);
}

}  // namespace columns
