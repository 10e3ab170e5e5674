// Torch tells another library what a tensor is through DLPack's exchange table: one C call without
// a Python object, instead of five attributes. Where there is no such table, the attributes it is.
#include "tensor.h"

namespace columns {
namespace {

constexpr int32_t kHost = 1;  // DLPack's code of host memory
constexpr uint32_t kMajor = 1;

struct DlTensor {
    void* data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;  // in elements
    uint64_t byte_offset;
};

struct DlExchange {
    uint32_t major, minor;
    const void* older;
    const void *allocate, *managed_of, *object_of;  // of which we need none
    int (*view_of)(void* object, DlTensor* out);    // borrowed; 0: well
};

using ViewOf = decltype(DlExchange::view_of);

// Null if this torch has no such table, or one of another layout.
ViewOf find_exchange() {
    const py::object capsule =
        py::getattr(names().tensor, "__dlpack_c_exchange_api__", py::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
    const auto* table = static_cast<const DlExchange*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    return table->major == kMajor ? table->view_of : nullptr;
}

// Our code of a dtype, in the order of `DTYPES` in asyncmoe/wire.py; 0: none.
uint8_t code_of(const DlTensor& view) {
    constexpr uint8_t known[kDtypes][2] = {{2, 32}, {4, 16}, {2, 16}, {0, 8},
                                           {1, 8},  {0, 32}, {0, 64}};
    for (uint8_t code = 1; code <= kDtypes; ++code) {
        if (view.code == known[code - 1][0] && view.bits == known[code - 1][1]) {
            return view.lanes == 1 ? code : 0;
        }
    }
    return 0;
}

uint8_t code_of(const py::object& dtype) {
    for (uint8_t code = 1; code <= kDtypes; ++code) {
        if (names().dtypes[code].ptr() == dtype.ptr()) return code;
    }
    return 0;
}

// By its attributes. What these say is never too little.
bool describe_slowly(py::handle tensor, TensorRows* found) {
    const py::object shape = tensor.attr("shape");
    found->dtype = code_of(tensor.attr("dtype"));
    if (found->dtype == 0 || py::len(shape) != 2) return false;
    if (!tensor.attr("is_contiguous")().cast<bool>()) return false;
    found->rows = py::int_(shape[py::int_(0)]).cast<int64_t>();
    found->hidden = py::int_(shape[py::int_(1)]).cast<int64_t>();
    found->data = nullptr;
    if (tensor.attr("is_cpu").cast<bool>()) {
        found->data = reinterpret_cast<const uint8_t*>(
            tensor.attr("data_ptr")().cast<uintptr_t>());
    }
    return true;
}

}  // namespace

bool describe(py::handle tensor, TensorRows* found) {
    static const ViewOf view_of = find_exchange();
    DlTensor view;
    const bool plain = view_of != nullptr && Py_IS_TYPE(tensor.ptr(), names().tensor_type);
    if (!plain || view_of(tensor.ptr(), &view) != 0 || view.device_type != kHost) {
        PyErr_Clear();
        return describe_slowly(tensor, found);
    }
    found->dtype = code_of(view);
    if (found->dtype == 0 || view.ndim != 2) return false;
    found->rows = view.shape[0];
    found->hidden = view.shape[1];
    const bool empty = found->rows == 0 || found->hidden == 0;
    const bool contiguous = (found->hidden == 1 || view.strides[1] == 1) &&
                            (found->rows == 1 || view.strides[0] == found->hidden);
    found->data = static_cast<const uint8_t*>(view.data) + view.byte_offset;
    return empty || contiguous;
}

const TensorRows* Described::of(py::handle object, py::handle tensor) {
    if (!object || !Py_IS_TYPE(object.ptr(), Boxed<Described>::type)) return nullptr;
    const Described& noted = unboxed<Described>(object.ptr());
    return noted.tensor == tensor.ptr() ? &noted.rows : nullptr;
}

py::object described(py::handle tensor) {
    TensorRows rows;
    if (!describe(tensor, &rows)) return py::none();
    auto made = Ref<Described>::make();
    *made = {tensor.ptr(), rows};
    return made.object();
}

void bind_tensor(py::module_& m) {
    add_box<Described>(m, "asyncmoe.native._columns.Described", {});
    m.def("described", &described);
}

}  // namespace columns
