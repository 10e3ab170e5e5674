// What transports/nixl_agent.py asks of the library for every write, without the package's wrappers
// around its bindings.
#pragma once

#include <utility>

#include "nixl_sending.h"

namespace columns {

class NixlLibrary {
  public:
    // `agent`: the bindings' own; `places`: their type of descriptor lists, which is called with
    // `memory` and an array; `operation`: to write; `done`, `under_way`: states of a transfer.
    NixlLibrary(py::object agent, py::object places, py::object memory, py::object operation,
                py::object done, py::object under_way)
        : places_(std::move(places)),
          memory_(std::move(memory)),
          operation_(std::move(operation)),
          done_(std::move(done)),
          under_way_(std::move(under_way)),
          create_(agent.attr("createXferReq")),
          post_(agent.attr("postXferReq")),
          release_(agent.attr("releaseXferReq")) {}

    // Write all of a batch, whose sources must be readable as they are, at agent `peer`. None if
    // that is done; else the handle, and what went wrong or None. Raises as the library does: then
    // there is no handle.
    py::object write(const py::object& peer, const NixlBatch& batch) const;

  private:
    bool let_go(const py::object& handle) const;

    const py::object places_, memory_, operation_, done_, under_way_, create_, post_, release_;
    const py::bytes no_note_;
    const py::list no_backends_;
};

void bind_nixl_library(py::module_& m);

}  // namespace columns
