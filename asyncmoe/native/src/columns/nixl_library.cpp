#include "nixl_library.h"

#include "function.h"

namespace columns {

py::object NixlLibrary::write(const py::object& peer, NixlBatch* batch, NixlReady* ready) const {
    py::object handle = ready == nullptr ? py::object() : ready->take(*batch);
    if (!handle) handle = make(peer, *batch);
    py::object trouble = py::none();
    try {
        const py::object state = call(post_, handle, batch->note);
        if (state.equal(done_)) {
            if (ready != nullptr) {
                ready->put(batch, std::move(handle));
                return py::none();
            }
            if (let_go(handle)) return py::none();
        } else if (!state.equal(under_way_)) {
            trouble = state;
        }
    } catch (py::error_already_set& error) {
        trouble = error.value();
    }
    return py::make_tuple(handle, trouble);
}

py::object NixlLibrary::make(const py::object& peer, const NixlBatch& batch) const {
    const py::object local = call(places_, memory_, batch.local());
    const py::object remote = call(places_, memory_, batch.remote());
    return call(create_, operation_, local, remote, peer, no_note_, no_backends_);
}

py::object NixlLibrary::writer(py::object peer, std::shared_ptr<NixlSending> sending,
                               py::object link, uint64_t most) {
    return function<0>([self = shared_from_this(), peer = std::move(peer),
                        sending = std::move(sending), link = std::move(link), most,
                        ready = std::make_shared<NixlReady>(release_)](
                           PyObject* const*) -> py::object {
        static PyObject* const error = PyUnicode_InternFromString("error");
        static PyObject* const send = PyUnicode_InternFromString("send");
        const std::shared_ptr<NixlBatch> batch = sending->next_batch();
        if (!batch) return py::none();
        if (batch->nbytes == 0 || batch->nbytes > most) {
            return py::make_tuple(batch, py::none());
        }
        py::object left;
        try {
            left = self->write(peer, batch.get(), ready.get());
        } catch (py::error_already_set& trouble) {
            return py::make_tuple(batch, py::make_tuple(py::none(), trouble.value()));
        }
        if (!left.is_none()) return py::make_tuple(batch, left);
        if (!batch->frames.empty() && get(link, error).is_none()) {
            call(get(link, send), batch->frames);
        }
        sending->written_out(batch);
        return py::int_(batch->nbytes);
    });
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
    py::class_<NixlLibrary, std::shared_ptr<NixlLibrary>>(m, "NixlLibrary")
        .def(py::init<py::object, py::object, py::object, py::object, py::object, py::object>())
        .def("write", [](const NixlLibrary& library, const py::object& peer,
                         NixlBatch* batch) { return library.write(peer, batch, nullptr); })
        .def("writer", &NixlLibrary::writer)
        .def("notes", &NixlLibrary::notes);
}

}  // namespace columns
