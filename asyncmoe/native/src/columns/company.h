// How long stages wait for rows that are on their way: the compiled twin of asyncmoe/company.py.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "queues.h"
#include "view.h"

namespace columns {

class Company {
  public:
    enum Kind : int { kAttention, kExpert, kHead };  // as in asyncmoe/stage.py

    Company(std::shared_ptr<Queues> queues, const py::array& max_rows, const py::array& min_rows,
            const py::array& linger_s, double patience, double share,
            const py::array& decode_chunk, const py::array& chunk_stage);

    void took(int kind, double seconds);
    void attend(double now_s);

  private:
    // Rows of decode steps that are at `stage` or on their way to it; negative: all of them.
    int64_t coming(int64_t stage) const;

    std::shared_ptr<Queues> queues_;
    std::array<py::array, 5> arrays_;  // own the columns
    Column<const int64_t> max_rows_;
    Column<int64_t> min_rows_;
    Column<double> linger_s_;
    Column<const int64_t> decode_chunk_;
    Column<const Number> chunk_stage_;
    std::vector<Kind> kinds_;
    int64_t layers_;
    double patience_, share_;
    std::array<double, 3> least_s_{};
};

void bind_company(py::module_& m);

}  // namespace columns
