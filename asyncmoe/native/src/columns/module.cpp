// The Python module `asyncmoe.native._columns`.
#include <pybind11/pybind11.h>

#include "bell.h"
#include "books.h"
#include "chunks.h"
#include "company.h"
#include "departure.h"
#include "draws.h"
#include "experts.h"
#include "function.h"
#include "handover.h"
#include "inbound.h"
#include "intake.h"
#include "lease.h"
#include "matched.h"
#include "memory.h"
#include "model_link.h"
#include "nixl_library.h"
#include "nixl_receiving.h"
#include "nixl_sending.h"
#include "outbound.h"
#include "outboxes.h"
#include "payload.h"
#include "policy.h"
#include "queues.h"
#include "routing.h"
#include "reader.h"
#include "shm_port.h"
#include "shm_receiver.h"
#include "shm_sender.h"
#include "tensor.h"
#include "timeline.h"
#include "tokens.h"
#include "turn.h"
#include "wire.h"
#include "writer.h"

PYBIND11_MODULE(_columns, m) {
    using namespace columns;
    m.doc() = "Index columns of parcels and tables.";
    m.def("all_local", [](py::handle block, py::ssize_t rows, py::ssize_t pairs,
                          py::handle local) { return all_local(block, rows, pairs, local); });
    m.def("route", &route);
    m.def("expert_batch", &expert_batch);
    m.def("accept", &accept);
    m.def("by_stage", &by_stage);
    m.def("scatter", &scatter);
    m.def("scatter_combine", &scatter_combine);
    m.def("draw_distinct", &draw_distinct);
    m.def("memory", &memory);
    m.def("look", &look);
    m.def("by_key", &by_key);
    bind_tensor(m);
    bind_lease(m);
    bind_inbound(m);
    bind_outbound(m);
    bind_queues(m);
    bind_company(m);
    bind_outboxes(m);
    bind_bell(m);
    bind_handover(m);
    bind_books(m);
    bind_departure(m);
    bind_intake(m);
    bind_reader(m);
    bind_writer(m);
    bind_matched(m);
    bind_nixl_sending(m);
    bind_nixl_library(m);
    bind_nixl_receiving(m);
    bind_shm_sender(m);
    bind_shm_receiver(m);
    bind_shm_port(m);
    bind_timeline(m);
    bind_turn(m);
    bind_model_link(m);
}
