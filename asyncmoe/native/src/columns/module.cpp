// The Python module `asyncmoe.native._columns`.
#include <pybind11/pybind11.h>

#include "chunks.h"
#include "experts.h"
#include "memory.h"
#include "payload.h"
#include "policy.h"
#include "routing.h"
#include "rows.h"
#include "stream.h"
#include "tokens.h"
#include "wire.h"

PYBIND11_MODULE(_columns, m) {
    using namespace columns;
    m.doc() = "Index columns of parcels and tables.";
    m.def("encode_parcel", &encode_parcel);
    m.def("decode_parcel", &decode_parcel);
    m.def("check_columns", &check_columns);
    m.def("all_local", &all_local);
    m.def("route", &route);
    m.def("expert_batch", &expert_batch);
    m.def("accept", &accept);
    m.def("expect", &expect);
    m.def("all_alive", &all_alive);
    m.def("complete", &complete);
    m.def("leave", &leave);
    m.def("by_stage", &by_stage);
    m.def("gather_rows", &gather_rows);
    m.def("scatter", &scatter);
    m.def("memory", &memory);
    m.def("look", &look);
    m.def("send", &send);
    m.def("receive", &receive);
}
