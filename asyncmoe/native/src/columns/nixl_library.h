// What transports/nixl_agent.py asks of the library for every write, without the package's wrappers
// around its bindings.
#pragma once

#include <memory>
#include <utility>

#include "nixl_ready.h"

namespace columns {

class NixlLibrary : public std::enable_shared_from_this<NixlLibrary> {
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
          release_(agent.attr("releaseXferReq")),
          notes_(agent.attr("getNotifs")) {}

    // Write all of a batch, whose sources must be readable as they are, at agent `peer`. None if
    // that is done; else the handle, and what went wrong or None. Raises as the library does: then
    // there is no handle. `ready`, if not null, is asked for a handle, and keeps it with the
    // batch's places when it is done.
    py::object write(const py::object& peer, NixlBatch* batch, NixlReady* ready) const;

    // A function that writes what `sending` has next, and does all that is due behind it: its
    // frames go over `link`. Returns the bytes of that, or None if there is nothing. What is not
    // done by then is left to others: a tuple of the batch and what `write` has left (a handle may
    // be None), or of the batch and None if it is empty or larger than `most` bytes. It keeps
    // handles, of which it lets go when it ends.
    py::object writer(py::object peer, std::shared_ptr<NixlSending> sending, py::object link,
                      uint64_t most);

    // What has come in from each agent: a dictionary of lists of bytes. Raises as the library does.
    py::object notes() const { return call(notes_, py::dict(), no_backends_); }

  private:
    py::object make(const py::object& peer, const NixlBatch& batch) const;
    bool let_go(const py::object& handle) const;

    const py::object places_, memory_, operation_, done_, under_way_, create_, post_, release_,
        notes_;
    const py::bytes no_note_;
    const py::list no_backends_;
};

void bind_nixl_library(py::module_& m);

}  // namespace columns
