// Whatever is not as usual is handed to the executor before anything is touched.
#include "turn.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "function.h"
#include "handover.h"
#include "members.h"
#include "numbers.h"

namespace columns {
namespace {

constexpr size_t kMostUntold = 64;

struct Attributes {
    PyObject* const prepare = PyUnicode_InternFromString("prepare");
    PyObject* const finish = PyUnicode_InternFromString("finish");
    PyObject* const row_count = PyUnicode_InternFromString("row_count");
    PyObject* const stage = PyUnicode_InternFromString("stage");
    const py::object passed = py::module_::import("asyncmoe.passage").attr("Passed");
};

const Attributes& attributes() {
    static const Attributes* const found = new Attributes;
    return *found;
}

// The members of `KindTimes` in asyncmoe/stats.py.
struct TimesMembers {
    Member batches, rows, compute_s, prepare_s, finish_s;
};

const TimesMembers& of_times() {
    static const TimesMembers* const found = [] {
        const py::object type = py::module_::import("asyncmoe.stats").attr("KindTimes");
        return new TimesMembers{Member(type, "batches"), Member(type, "rows"),
                                Member(type, "compute_s"), Member(type, "prepare_s"),
                                Member(type, "finish_s")};
    }();
    return *found;
}

int64_t stage_of(const py::object& step) {
    if (ExpertStages::is_step(step.ptr())) return ExpertStages::stage_of(step.ptr());
    if (AttentionStages::is_step(step.ptr())) return AttentionStages::stage_of(step.ptr());
    return whole(get(step, attributes().stage).ptr());
}

int64_t rows_of(const py::object& step) {
    if (ExpertStages::is_step(step.ptr())) return ExpertStages::rows_of(step.ptr());
    if (AttentionStages::is_step(step.ptr())) return AttentionStages::rows_of(step.ptr());
    return whole(get(step, attributes().row_count).ptr());
}

void add(const Member& member, const py::object& to, double more) {
    member.set(to.ptr(), py::float_(real(member.of(to.ptr())) + more));
}

void add(const Member& member, const py::object& to, int64_t more) {
    member.set(to.ptr(), py::int_(whole(member.of(to.ptr())) + more));
}

}  // namespace

void Turn::init(py::handle self, const py::object& workings) {
    ender_ = self.attr("done");
    fill_ = workings.attr("fill");
    done_ = workings.attr("done");
    fail_ = workings.attr("fail");
    travel_ = workings.attr("travel");
    look_again_ = workings.attr("look_again");
    stages_ = workings.attr("stages");
    running_ = workings.attr("running");
    after_ = workings.attr("after");
    append_ = running_.attr("append");
    popleft_ = running_.attr("popleft");
    executed_ = workings.attr("executed");
    submit_ = workings.attr("submit");
    clock_ = Clock(workings.attr("clock"));
    now_s_ = Clock(workings.attr("now_s"));
    depth_ = workings.attr("depth").cast<int64_t>();
    queues_ = workings.attr("queues").cast<std::shared_ptr<Queues>>();
    const py::object experts = workings.attr("experts");
    if (!experts.is_none()) experts_ = std::make_shared<ExpertStages>(experts);
    const py::object attention_stages = workings.attr("attention");
    if (!attention_stages.is_none()) {
        attention_ = std::make_shared<AttentionStages>(attention_stages);
    }
    policy_ = workings.attr("policy");
    const auto max_rows = column<int64_t>(policy_.attr("max_rows"), "max_rows");
    min_rows_ = column<int64_t>(policy_.attr("min_rows"), "min_rows");
    linger_s_ = column<double>(policy_.attr("linger_s"), "linger_s");
    const py::object company = workings.attr("company");
    if (!company.is_none()) company_ = company.cast<std::shared_ptr<Company>>();
    const py::object kinds = py::module_::import("asyncmoe.stage").attr("Kind");
    const py::object attention = kinds.attr("ATTENTION");
    const bool is_virtual = workings.attr("virtual").cast<bool>();
    const py::object times = workings.attr("times");
    for (const py::handle kind : queues_->chain.attr("kinds")) {
        const int64_t stage = of_stage_.size();
        of_stage_.push_back({times[kind], !is_virtual && kind.is(attention),
                             kind.cast<int>(), max_rows.at(stage, "max_rows")});
    }
    check_size(min_rows_.size, of_stage_.size(), "min_rows");
    check_size(linger_s_.size, of_stage_.size(), "linger_s");
}

void Turn::close() {
    closed_ = true;
    stages_ = py::none();
    watch();
    const py::object gone = std::exchange(spent_, py::none());
}

int Turn::visit(visitproc visit, void* arg) {
    for (const py::object* each :
         {&fill_, &done_, &fail_, &travel_, &look_again_, &stages_, &running_, &after_, &append_,
          &popleft_, &submit_, &ender_, &executed_, &spent_, &clock_.object(), &now_s_.object()}) {
        Py_VISIT(each->ptr());
    }
    for (const Stage& each : of_stage_) Py_VISIT(each.times.ptr());
    int stopped = 0;
    const auto each = [&](const py::object& reference) {
        if (stopped == 0 && reference.ptr() != nullptr) stopped = visit(reference.ptr(), arg);
    };
    if (experts_ && experts_.use_count() == 1) experts_->each_reference(each);
    if (attention_ && attention_.use_count() == 1) attention_->each_reference(each);
    return stopped;
}

void Turn::clear() {
    close();
    for (py::object* each :
         {&fill_, &done_, &fail_, &travel_, &look_again_, &submit_, &ender_, &executed_}) {
        const py::object gone = std::exchange(*each, py::none());
    }
}

// An error of ours, or of a rule or a stage, ends the executor.
template <typename F>
void Turn::attempt(F work) {
    try {
        work();
        return;
    } catch (py::error_already_set& error) {
        error.restore();
    } catch (const py::builtin_exception& error) {
        error.set_error();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    py::error_already_set raised;
    if (!raised.matches(PyExc_Exception)) throw raised;
    const py::object value = raised.value();
    const py::object fail = fail_;
    call(fail, value);
}

void Turn::hear() {
    if (is_closed()) return;
    bell->rung = false;
    attempt([this] {
        if (queues_->total != 0 && !is_full()) fill(clock_());
    });
}

// See `Executor._fill`. `begin_s`: since when the work of the first batch counts.
void Turn::fill(double begin_s) {
    while (!is_closed() && !is_full() && queues_->total != 0) {
        const Choice choice = choose();
        if (choice.what == Choice::kWait) return;
        if (choice.what == Choice::kAsk) {
            tell();
            const py::object ask = fill_;
            call(ask);
            return;
        }
        const py::object step = prepare(choice.stage);
        note(choice.stage, rows_of(step));
        call(append_, step);
        submit(step);
        const double end_s = clock_();
        add(of_times().prepare_s, of_stage_[choice.stage].times, end_s - begin_s);
        begin_s = end_s;
    }
}

// See `Executor._choose`: settles only what leaves no choice.
Turn::Choice Turn::choose() const {
    const Queues& queues = *queues_;
    if (company_) company_->attend(now_s_());
    int64_t runnable = 0, first = -1;
    bool lingers = false;
    double time_s = 0, next_s = std::numeric_limits<double>::infinity();
    for (size_t stage = 0; stage < of_stage_.size(); ++stage) {
        const int64_t rows = queues.rows[stage];
        bool may_run = rows >= min_rows_[stage];
        if (!may_run && rows > 0) {
            if (!lingers) time_s = now_s_();
            lingers = true;
            const double lingered_s = queues.oldest_s[stage] + linger_s_[stage];
            may_run = lingered_s <= time_s;
            next_s = std::min(next_s, lingered_s);
        }
        if (may_run && runnable++ == 0) first = stage;
    }
    if (runnable == 0) {
        if (lingers) {
            const py::object look_again = look_again_;
            call(look_again, py::float_(next_s));
        }
        return {Choice::kWait};
    }
    const int64_t rows = queues.rows[first], most = of_stage_[first].max_rows;
    if (runnable == 1 && rows < most && computes()) return {Choice::kWait};
    if (rows == queues.total && rows <= most) return {Choice::kRun, first};
    return {Choice::kAsk};
}

py::object Turn::prepare(int64_t stage) {
    const int64_t most = of_stage_[stage].max_rows;
    if (experts_ && experts_->has(stage)) {
        const auto experts = experts_;
        return experts->prepare(stage, most);
    }
    const auto attention = attention_;
    py::object step = attention && attention->has(stage)
                          ? attention->prepare(stage, most)
                          : call_method(stages_, attributes().prepare, py::int_(stage),
                                        py::int_(most));
    if (of_stage_[stage].travels && queues_->total == 0 && !computes()) {
        const py::object travel = travel_;
        step = call(travel, py::int_(stage), step);
    }
    return step;
}

// Till the next batch goes to the device; not if there will be none.
void Turn::keep(const py::object& step, PyObject* result) {
    if (is_closed() || Function<2, Submitting>::of(submit_) == nullptr) return;
    PyObject* const all = PyTuple_Pack(3, spent_.ptr(), step.ptr(), result);
    if (all == nullptr) throw py::error_already_set();
    spent_ = py::reinterpret_steal<py::object>(all);
}

void Turn::submit(const py::object& step) {
    if (const Submitting* thread = Function<2, Submitting>::of(submit_)) {
        thread->handover->submit(step, ender_, std::exchange(spent_, py::none()));
    } else {
        const py::object submit = submit_;
        call(submit, step, ender_);
    }
}

void Turn::note(int64_t stage, int64_t rows) {
    ++queues_->decision;
    if (executed_.is_none()) return;
    untold_.emplace_back(stage, rows);
    if (untold_.size() >= kMostUntold) tell();
}

void Turn::passed(const py::list& stages, int64_t rows) {
    bool is_first = true;
    for (const py::handle each : stages) {
        const py::tuple pair = py::reinterpret_borrow<py::tuple>(each);
        if (!py::isinstance<py::tuple>(each) || pair.size() != 2) {
            throw py::type_error("a stage and its seconds");
        }
        const int64_t stage = whole(PyTuple_GET_ITEM(pair.ptr(), 0));
        const py::object times = stage_at(stage).times;
        add(of_times().batches, times, int64_t{1});
        add(of_times().rows, times, rows);
        add(of_times().compute_s, times, real(PyTuple_GET_ITEM(pair.ptr(), 1)));
        if (!std::exchange(is_first, false)) note(stage, rows);
    }
}

const Turn::Stage& Turn::stage_at(int64_t stage) const {
    if (stage < 0 || stage >= static_cast<int64_t>(of_stage_.size())) {
        throw py::index_error("no such stage");
    }
    return of_stage_[stage];
}

// To tell the rule of many at once costs less than to run its cold code for each.
void Turn::tell() {
    std::vector<std::pair<int64_t, int64_t>> batches;
    std::swap(batches, untold_);
    const py::object executed = executed_;
    for (const auto& [stage, rows] : batches) call(executed, py::int_(stage), py::int_(rows));
}

// See `Executor._done`.
void Turn::done(PyObject* result, PyObject* error, PyObject* compute_s) {
    if (is_closed()) return;
    if (error != Py_None || length_of(after_) != 0 ||
        Py_TYPE(result) == reinterpret_cast<PyTypeObject*>(attributes().passed.ptr())) {
        const py::object done = done_;
        call(done, py::handle(result), py::handle(error), py::handle(compute_s));
        return;
    }
    const py::object step = call(popleft_);  // a device works in order
    attempt([&] {
        const double end_s = finish(step, result, compute_s);
        keep(step, result);
        if (computes()) {
            bell->ring();
        } else {  // before anything else that waits for the loop: the device is idle
            fill(end_s);
        }
    });
}

// Returns when it was over, by the clock.
double Turn::finish(const py::object& step, PyObject* result, PyObject* compute_s) {
    const double begin_s = clock_();
    const int64_t stage = stage_of(step);
    const py::object times = stage_at(stage).times;
    add(of_times().batches, times, int64_t{1});
    add(of_times().rows, times, rows_of(step));
    add(of_times().compute_s, times, real(compute_s));
    if (company_) company_->took(of_stage_[stage].kind, real(compute_s));
    const auto experts = experts_;
    const auto attention = attention_;
    if (experts && ExpertStages::is_step(step.ptr())) {
        experts->finish(step.ptr(), py::reinterpret_borrow<py::object>(result));
    } else if (!attention || !AttentionStages::is_step(step.ptr()) ||
               !attention->finish(step.ptr(), result)) {
        call_method(stages_, attributes().finish, step, py::handle(result));
    }
    const double end_s = clock_();
    add(of_times().finish_s, times, end_s - begin_s);
    return end_s;
}

}  // namespace columns
