#include "expert_stages.h"

#include "members.h"
#include "numbers.h"

namespace columns {
namespace {

struct Attributes {
    PyObject* const back = PyUnicode_InternFromString("back");
};

const Attributes& attributes() {
    static const Attributes* const found = new Attributes;
    return *found;
}

// The class of a step and where its instances keep what.
struct StepMembers {
    py::object type;
    Member stage, layer, model, taken, row_count, local, local_experts, per_expert, columns,
        back, described;
};

const StepMembers& of_step() {
    static const StepMembers* const found = [] {
        const py::object type = py::module_::import("asyncmoe.steps").attr("ExpertStep");
        const auto member = [&](const char* name) { return Member(type, name); };
        return new StepMembers{
            type, member("stage"), member("layer"), member("model"), member("taken"),
            member("row_count"), member("local"), member("local_experts"), member("per_expert"),
            member("_columns"), member("_back"),
            member("_described")};
    }();
    return *found;
}

}  // namespace

ExpertStages::ExpertStages(const py::object& stages)
    : queues_(stages.attr("queues").cast<std::shared_ptr<Queues>>()),
      outboxes_(stages.attr("dispatcher").attr("outboxes").cast<std::shared_ptr<Outboxes>>()),
      model_(stages.attr("model")),
      per_expert_(stages.attr("per_expert")),
      held_array_(stages.attr("held_rows")),
      held_rows_(writable<int64_t>(held_array_, "held_rows")) {
    const py::object layers = stages.attr("layers"), local = stages.attr("local");
    const py::object counts = stages.attr("local_experts");
    for (int64_t stage = 0; stage < queues_->rows.array.size(); ++stage) {
        stages_.emplace_back();
        if (!has(stage)) continue;
        const py::int_ number(stage);
        const py::object layer = layers[number];
        stages_.back() = {number, layer, local[layer], counts[layer]};
    }
    const py::object home = stages.attr("home");
    if (!home.is_none()) homecoming_ = home.attr("homecoming").cast<std::shared_ptr<Homecoming>>();
}

py::object ExpertStages::prepare(int64_t stage, int64_t max_rows) const {
    const Ref<Taken> taken = queues_->take_rows(stage, max_rows);
    const StepMembers& slot = of_step();
    const Stage& of = stages_[stage];
    py::object step = blank(slot.type);
    PyObject* const to = step.ptr();
    slot.stage.set(to, of.number);
    slot.layer.set(to, of.layer);
    slot.model.set(to, model_);
    slot.taken.set(to, taken.object());
    slot.row_count.set(to, py::int_(taken->rows));
    slot.local.set(to, of.local);
    slot.local_experts.set(to, of.local_experts);
    slot.per_expert.set(to, per_expert_);
    slot.columns.set(to, Py_None);
    slot.back.set(to, Py_None);
    slot.described.set(to, Py_None);
    return step;
}

void ExpertStages::finish(PyObject* step, const py::object& out) const {
    const StepMembers& slot = of_step();
    auto back = py::reinterpret_borrow<py::object>(slot.back.of(step));
    if (back.is_none()) back = get(step, attributes().back);
    const py::handle described(slot.described.of(step));
    for (const PackedView& own : outboxes_->answer(stage_of(step), back, out, described)) {
        if (!homecoming_) throw py::value_error("rows of a rank that is home of nothing");
        homecoming_->take_in(own, Release());
    }
    Ref<Taken>::of(slot.taken.of(step))->read(held_rows_);
    if (homecoming_) homecoming_->let_go();
}

bool ExpertStages::is_step(PyObject* object) {
    return Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(of_step().type.ptr());
}

int64_t ExpertStages::stage_of(PyObject* step) { return whole(of_step().stage.of(step)); }

int64_t ExpertStages::rows_of(PyObject* step) { return whole(of_step().row_count.of(step)); }

}  // namespace columns
