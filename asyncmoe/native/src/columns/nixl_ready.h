// Transfers to one NIXL peer that were done and may be posted again, which saves what it costs to
// describe and to make them. Payloads come back at the same addresses, from pools, and slots are
// the lowest free ones, so some of them are asked for again.
#pragma once

#include <utility>
#include <vector>

#include "nixl_sending.h"

namespace columns {

class NixlReady {
  public:
    explicit NixlReady(py::object release) : release_(std::move(release)) {}
    NixlReady(const NixlReady&) = delete;
    NixlReady& operator=(const NixlReady&) = delete;
    ~NixlReady() {
        for (Entry& entry : entries_) let_go(entry.handle);
    }

    // The handle of a transfer of the same pieces to the same places, which is the caller's from
    // now on; null if there is none.
    py::object take(const NixlBatch& batch) {
        for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
            if (entry->remotes != batch.remotes || entry->locals != batch.locals) continue;
            py::object handle = std::move(entry->handle);
            entries_.erase(entry);
            return handle;
        }
        return {};
    }

    // Keep a handle that is done. The one that was used the longest ago may have to go.
    void put(NixlBatch* batch, py::object handle) {
        if (entries_.size() == kMost) {
            let_go(entries_.front().handle);
            entries_.erase(entries_.begin());
        }
        entries_.push_back({std::move(batch->locals), std::move(batch->remotes),
                            std::move(handle)});
    }

  private:
    static constexpr size_t kMost = 16;
    struct Entry {
        std::vector<NixlBatch::Place> locals, remotes;
        py::object handle;
    };

    void let_go(const py::object& handle) const {
        try {
            call(release_, handle);
        } catch (py::error_already_set&) {
            // Nothing of it is under way, so there is nothing to wait for.
        }
    }

    const py::object release_;
    std::vector<Entry> entries_;  // the one that was used last is the last
};

}  // namespace columns
