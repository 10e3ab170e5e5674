#include "attention_stages.h"

#include "members.h"
#include "numbers.h"
#include "rows.h"

namespace columns {
namespace {

// The classes of a step, of its rows and of its result, and where instances keep what.
struct StepMembers {
    py::object type;
    Member stage, layer, rows, tokens, model, table, cache, router;
    struct {
        py::object type;
        Member request_ids, pool, chunks, gathered, columns, batch;
    } of_rows;
    Member routed, parts, parcels;
};

const StepMembers& of_step() {
    static const StepMembers* const found = [] {
        const py::module_ steps = py::module_::import("asyncmoe.steps");
        const py::object type = steps.attr("AttentionStep");
        const py::object rows = py::module_::import("asyncmoe.rows").attr("Rows");
        const py::object routed = py::module_::import("asyncmoe.routing").attr("Routed");
        const auto member = [&](const char* name) { return Member(type, name); };
        const auto of_rows = [&](const char* name) { return Member(rows, name); };
        return new StepMembers{
            type, member("stage"), member("layer"), member("rows"), member("tokens"),
            member("model"), member("table"), member("cache"), member("router"),
            {rows, of_rows("request_ids"), of_rows("pool"), of_rows("chunks"),
             of_rows("gathered"), of_rows("_columns"), of_rows("_batch")},
            Member(steps.attr("AttentionResult"), "routed"), Member(routed, "parts"),
            Member(routed, "parcels")};
    }();
    return *found;
}

}  // namespace

AttentionStages::AttentionStages(const py::object& stages)
    : queues_(stages.attr("queues").cast<std::shared_ptr<Queues>>()),
      departure_(stages.attr("departure").cast<std::shared_ptr<Departure>>()),
      books_(stages.attr("home").attr("books").cast<std::shared_ptr<Books>>()),
      homecoming_(stages.attr("home").attr("homecoming").cast<std::shared_ptr<Homecoming>>()),
      model_(stages.attr("model")),
      table_(stages.attr("home").attr("table")),
      cache_(stages.attr("cache")),
      router_(stages.attr("dispatcher").attr("router")),
      pool_(stages.attr("home").attr("pool")),
      request_ids_(stages.attr("home").attr("id_of_row")),
      tokens_(table_.attr("token")),
      no_tokens_(stages.attr("no_tokens")) {
    const py::object layers = stages.attr("layers");
    const py::object attention =
        py::module_::import("asyncmoe.stage").attr("Kind").attr("ATTENTION");
    for (const py::handle kind : queues_->chain.attr("kinds")) {
        const int64_t stage = stages_.size();
        stages_.emplace_back();
        if (!kind.is(attention)) continue;
        const py::int_ number(stage);
        stages_.back() = {number, layers[number]};
    }
    last_layer_ = queues_->chain.attr("layers").cast<int64_t>() - 1;
}

py::object AttentionStages::prepare(int64_t stage, int64_t max_rows) const {
    const StepMembers& slot = of_step();
    const Stage& of = stages_[stage];
    const py::tuple gathered = gather_rows(*books_, queues_->take_chunks(stage, max_rows));
    const py::object of_gathered = gathered[1];
    py::object rows = blank(slot.of_rows.type), step = blank(slot.type);
    slot.of_rows.request_ids.set(rows.ptr(), request_ids_);
    slot.of_rows.pool.set(rows.ptr(), pool_);
    slot.of_rows.chunks.set(rows.ptr(), PyTuple_GET_ITEM(gathered.ptr(), 0));
    slot.of_rows.gathered.set(rows.ptr(), of_gathered);
    slot.of_rows.columns.set(rows.ptr(), Py_None);
    slot.of_rows.batch.set(rows.ptr(), Py_None);
    PyObject* const to = step.ptr();
    slot.stage.set(to, of.number);
    slot.layer.set(to, of.layer);
    slot.rows.set(to, rows);
    slot.tokens.set(to, whole(of.layer.ptr()) == 0
                            ? py::object(Ref<Gathered>::of(of_gathered)->at_slots(tokens_))
                            : no_tokens_);
    slot.model.set(to, model_);
    slot.table.set(to, table_);
    slot.cache.set(to, cache_);
    slot.router.set(to, router_);
    return step;
}

bool AttentionStages::finish(PyObject* step, PyObject* result) const {
    const StepMembers& slot = of_step();
    PyObject* const rows = slot.rows.of(step);
    PyObject* const routed = slot.routed.of(result);
    if (routed == Py_None) return false;
    const auto gathered = Ref<Gathered>::of(slot.of_rows.gathered.of(rows));
    const bool may_end = whole(slot.layer.of(step)) == last_layer_;
    if (may_end && gathered->rows > gathered->singles) return false;
    const auto chunks = py::reinterpret_borrow<py::object>(slot.of_rows.chunks.of(rows));
    const auto parcels = py::reinterpret_borrow<py::list>(slot.parcels.of(routed));
    if (!departure_->leave(gathered.object(), chunks, stage_of(step) + 1, slot.parts.of(routed),
                           parcels)) {
        return false;
    }
    homecoming_->let_go();
    return true;
}

bool AttentionStages::is_step(PyObject* object) {
    return Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(of_step().type.ptr());
}

int64_t AttentionStages::stage_of(PyObject* step) { return whole(of_step().stage.of(step)); }

int64_t AttentionStages::rows_of(PyObject* step) {
    const StepMembers& slot = of_step();
    return Ref<Gathered>::of(slot.of_rows.gathered.of(slot.rows.of(step)))->rows;
}

}  // namespace columns
