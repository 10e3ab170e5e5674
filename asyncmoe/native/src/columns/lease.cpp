#include "lease.h"

#include <algorithm>
#include <utility>

#include "function.h"
#include "memory.h"

namespace columns {
namespace {

constexpr int kSmallestPower = 12;
constexpr size_t kViews = 256;  // a power of two

uint8_t* host_memory(const py::object& tensor) {
    if (!tensor.attr("is_cpu").cast<bool>()) return nullptr;
    return reinterpret_cast<uint8_t*>(tensor.attr("data_ptr")().cast<uintptr_t>());
}

int power_of(int64_t nbytes) {
    int power = kSmallestPower;
    while ((int64_t{1} << power) < nbytes) ++power;
    return power;
}

Lease::OnFree calling(const py::object& on_free) {
    return [on_free] { call(on_free); };
}

}  // namespace

Block::Block(int64_t id, py::object tensor)
    : id(id),
      tensor(tensor),
      data(host_memory(tensor)),
      size(tensor.attr("numel")().cast<int64_t>()) {}

py::object Block::rows(py::handle dtype, int64_t rows, int64_t hidden) {
    if (views_.empty()) views_.resize(kViews);
    View& view = views_[static_cast<size_t>(rows) % kViews];
    if (!view.tensor || view.rows != rows || view.hidden != hidden || view.dtype != dtype.ptr()) {
        view = {dtype.ptr(), rows, hidden, names().rows_of(tensor, dtype, rows, hidden)};
    }
    return view.tensor;
}

Lease::Lease(std::shared_ptr<Pool> pool, std::shared_ptr<Block> block, int64_t nbytes,
             OnFree on_free)
    : nbytes(nbytes),
      generation(block->generation),
      pool_(std::move(pool)),
      block_(std::move(block)),
      on_free_(std::move(on_free)) {
    ++pool_->counts_[static_cast<int>(State::kFilling)];
}

py::memoryview Lease::memory() const {
    if (block_->data == nullptr) return py::memoryview(py::bytes());
    return columns::memory(block_->tensor, reinterpret_cast<uintptr_t>(block_->data), nbytes);
}

void Lease::move(State source, State target) {
    if (state_ != source) {
        const py::tuple states = names().lease_states;
        const auto name = [&](State state) {
            return states[static_cast<int>(state)].attr("name").cast<std::string>();
        };
        throw std::runtime_error("lease " + std::to_string(block_->id) + " generation " +
                                 std::to_string(generation) + " is " + name(state_) + ", not " +
                                 name(source) + ": it cannot become " + name(target));
    }
    state_ = target;
    pool_->moved(source, target);
    if (target == State::kFree) {
        const OnFree on_free = std::move(on_free_);
        pool_->reclaim(block_, !on_free);
        if (on_free) on_free();
    }
}

std::shared_ptr<Lease> Pool::obtain(int64_t nbytes) {
    const int power = power_of(nbytes);
    std::shared_ptr<Block> block;
    auto& idle = idle_[power];
    if (idle.empty()) {
        block = this->block(call(allocate_, py::int_(int64_t{1} << power)));
    } else {
        block = std::move(idle.back());  // the most recent, which is the likeliest in the cache
        idle.pop_back();
        idle_bytes_ -= block->size;
    }
    return std::make_shared<Lease>(shared_from_this(), std::move(block), nbytes, nullptr);
}

std::shared_ptr<Lease> Pool::adopt(py::object memory, py::object on_free) {
    auto block = this->block(std::move(memory));
    const int64_t size = block->size;
    return lend(std::move(block), size, calling(on_free));
}

std::shared_ptr<Lease> Pool::lend(std::shared_ptr<Block> block, int64_t nbytes,
                                  Lease::OnFree on_free) {
    return std::make_shared<Lease>(shared_from_this(), std::move(block), nbytes,
                                   std::move(on_free));
}

std::shared_ptr<Block> Pool::block(py::object memory) {
    return std::make_shared<Block>(++blocks_, std::move(memory));
}

void Pool::reclaim(const std::shared_ptr<Block>& block, bool reuse) {
    ++block->generation;
    if (reuse && idle_bytes_ + block->size <= limit_) {
        idle_[power_of(block->size)].push_back(block);
        idle_bytes_ += block->size;
    }
}

void Release::operator()() {
    if (lease_) {
        const std::shared_ptr<Lease> lease = std::move(lease_);
        lease->release();
    } else if (callback_) {
        const py::object callback = std::move(callback_);
        if (!callback.is_none()) call(callback);  // that is what the collector leaves of it
    }
}

py::object Release::object() const {
    if (!lease_) return callback_ ? callback_ : py::none();
    return function<0>([lease = lease_](PyObject* const*) -> py::object {
        lease->release();
        return py::none();
    });
}

void bind_lease(py::module_& m) {
    py::class_<Block, std::shared_ptr<Block>>(m, "Block")
        .def_readonly("id", &Block::id)
        .def_readonly("tensor", &Block::tensor)
        .def_readonly("generation", &Block::generation);
    py::class_<Lease, std::shared_ptr<Lease>>(m, "Lease")
        .def("arrived", &Lease::arrived)
        .def("release", &Lease::release)
        .def("abandon", &Lease::abandon)
        .def("quiet", &Lease::quiet)
        .def("rows",
             [](Lease& lease, py::handle dtype, int64_t rows, int64_t hidden) {
                 return lease.block().rows(dtype, rows, hidden);
             })
        .def_property_readonly("memory", &Lease::memory)
        .def_property_readonly("id", [](const Lease& lease) { return lease.block().id; })
        .def_readonly("generation", &Lease::generation)
        .def_readonly("nbytes", &Lease::nbytes)
        .def_property_readonly("state", [](const Lease& lease) -> py::object {
            return names().lease_states[py::int_(static_cast<int>(lease.state()))];
        });
    const auto count = [](State state) {
        return [state](const Pool& pool) { return pool.count(state); };
    };
    py::class_<Pool, std::shared_ptr<Pool>>(m, "LeasePool")
        .def(py::init<int64_t, py::object>())
        .def("obtain", &Pool::obtain)
        .def("adopt", &Pool::adopt)
        .def("lend",
             [](Pool& pool, std::shared_ptr<Block> block, int64_t nbytes, py::object on_free) {
                 return pool.lend(std::move(block), nbytes, calling(on_free));
             })
        .def("block", &Pool::block)
        .def_property_readonly("filling", count(State::kFilling))
        .def_property_readonly("held", count(State::kHeld))
        .def_property_readonly("quarantined", count(State::kQuarantined))
        .def_property_readonly("live", &Pool::live)
        .def_property_readonly("idle_bytes", &Pool::idle_bytes);
}

}  // namespace columns
