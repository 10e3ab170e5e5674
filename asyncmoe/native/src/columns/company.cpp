#include "company.h"

#include <algorithm>
#include <cmath>

namespace columns {
namespace {

constexpr double kForget = 1.02, kShortestS = 0.0005, kMany = 16;

}  // namespace

Company::Company(std::shared_ptr<Queues> queues, const py::array& max_rows,
                 const py::array& min_rows, const py::array& linger_s, double patience,
                 double share, const py::array& decode_chunk, const py::array& chunk_stage)
    : queues_(std::move(queues)),
      arrays_{max_rows, min_rows, linger_s, decode_chunk, chunk_stage},
      max_rows_(column<int64_t>(max_rows, "max_rows")),
      min_rows_(writable<int64_t>(min_rows, "min_rows")),
      linger_s_(writable<double>(linger_s, "linger_s")),
      decode_chunk_(column<int64_t>(decode_chunk, "decode_chunk")),
      chunk_stage_(column<Number>(chunk_stage, "chunk_stage")),
      layers_(queues_->chain.attr("layers").cast<int64_t>()),
      patience_(patience),
      share_(share) {
    for (const py::handle kind : queues_->chain.attr("kinds")) {
        kinds_.push_back(static_cast<Kind>(kind.cast<int>()));
    }
    check_size(max_rows_.size, kinds_.size(), "max_rows");
    check_size(min_rows_.size, kinds_.size(), "min_rows");
    check_size(linger_s_.size, kinds_.size(), "linger_s");
}

void Company::took(int kind, double seconds) {
    double& least_s = least_s_.at(kind);
    least_s = least_s == 0 ? seconds : std::min(seconds, least_s * kForget);
}

void Company::attend(double now_s) {
    const double step_s =
        layers_ * (least_s_[kAttention] + least_s_[kExpert]) + least_s_[kHead];
    for (int64_t stage = 0; stage < static_cast<int64_t>(kinds_.size()); ++stage) {
        const int64_t here = queues_->rows[stage];
        if (here == 0) continue;
        const Kind kind = kinds_[stage];
        int64_t rows = 1;
        double price_s = stage == 0 ? step_s : least_s_[kind];
        if (kind != kExpert) {
            rows = coming(stage == 0 ? -1 : stage);
        } else if (here * share_ < kMany &&
                   queues_->awaits(stage, std::max<int64_t>(1, layers_ / 2),
                                   now_s - patience_ * step_s)) {
            rows = here + 1;
            price_s *= 1 - std::pow(1 - share_, here);
        }
        const double wait_s = patience_ * price_s;
        if (wait_s < kShortestS) rows = 1;
        min_rows_[stage] = std::max<int64_t>(1, std::min(rows, max_rows_[stage]));
        linger_s_[stage] = wait_s;
    }
}

int64_t Company::coming(int64_t stage) const {
    int64_t rows = 0;
    for (py::ssize_t row = 0; row < decode_chunk_.size; ++row) {
        const int64_t chunk = decode_chunk_[row];
        if (chunk >= 0 && (stage < 0 || chunk_stage_.at(chunk, "chunk_stage") == stage)) ++rows;
    }
    return rows;
}

void bind_company(py::module_& m) {
    py::class_<Company, std::shared_ptr<Company>>(m, "Company")
        .def(py::init<std::shared_ptr<Queues>, const py::array&, const py::array&,
                      const py::array&, double, double, const py::array&, const py::array&>())
        .def("took", &Company::took)
        .def("attend", &Company::attend);
}

}  // namespace columns
