#include "names.h"

namespace columns {
namespace {

Names* look_up() {
    const auto module = [](const char* name) { return py::module_::import(name); };
    const py::object transport = module("asyncmoe.transport"), wire = module("asyncmoe.wire");
    const py::object packed = module("asyncmoe.packed"), lease = module("asyncmoe.lease");
    const py::object twophase = module("asyncmoe.twophase");
    auto* found = new Names;
    found->arrival = transport.attr("Arrival");
    found->parcel = transport.attr("Parcel");
    found->posted = transport.attr("Posted");
    found->tensor = module("torch").attr("Tensor");
    found->tensor_type = reinterpret_cast<PyTypeObject*>(found->tensor.ptr());
    found->packed_parcel = packed.attr("PackedParcel");
    found->pack = packed.attr("pack");
    for (int kind = 1; kind < kClasses; ++kind) {
        found->kinds[kind] = transport.attr("ParcelClass")(kind);
    }
    const py::tuple dtypes = wire.attr("DTYPES");
    for (int code = 1; code <= kDtypes; ++code) found->dtypes[code] = dtypes[code - 1];
    found->lease_states = py::tuple(lease.attr("LeaseState"));
    found->rows_of = lease.attr("rows_of");
    found->encode_parcel = wire.attr("encode_parcel");
    found->decode_prelude = wire.attr("decode_prelude");
    found->check_parcel = wire.attr("check_parcel");
    found->refuse_order = twophase.attr("refuse_order");
    found->refuse_place = twophase.attr("refuse_place");
    found->report_fault = twophase.attr("report_fault");
    const py::object protocol_error = module("asyncmoe.errors").attr("ProtocolError");
    found->protocol_error = protocol_error.inc_ref().ptr();
    return found;
}

}  // namespace

const Names& names() {
    static const Names* const found = look_up();
    return *found;
}

}  // namespace columns
