// The micro-queues of one rank: the compiled twin of `Queues` in asyncmoe/microqueue.py.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "books.h"
#include "boxed.h"
#include "lease.h"
#include "parcel.h"
#include "ring.h"

namespace columns {

// A lease shared by the pieces of a split parcel, see the twin.
struct Hold {
    int64_t rows;
    Release release;

    void read(int64_t read_rows);
};

struct RowSegment {
    template <typename F>
    void each_reference(F& visit) {
        visit(parcel.packed);
        visit(parcel.payload);
        if (hold.use_count() == 1) hold->release.each_reference(visit);  // else not of it alone
    }

    int64_t source;
    PackedView parcel;
    std::shared_ptr<Hold> hold;
    double joined_s;
    int64_t joined_decision;
};

// Rows that were taken for a batch: the compiled twin of `Taken` in asyncmoe/microqueue.py.
struct Taken {
    void init(std::vector<RowSegment> taken);

    py::list payloads() const;
    py::tuple columns(py::handle local, py::ssize_t local_experts, bool per_expert) const;
    // The parcels themselves end with this object, wherever that does.
    void read(const Column<int64_t>& held_rows);

    int visit(visitproc visit, void* arg);
    void clear() { const std::vector<RowSegment> gone = std::move(segments); }

    int64_t rows = 0;
    bool is_read = false;
    std::vector<RowSegment> segments;  // in ascending order of their source
};

class Queues {
  public:
    explicit Queues(py::object chain);

    void put_chunks(int64_t stage, py::handle chunks, py::handle rows, double now_s,
                    py::handle total);
    // The same for some that are ready together, of the stages that `table` has.
    void put_ready(const Chunks& table, const std::vector<Number>& chunks, double now_s);
    void put_parcel(int64_t source, py::handle parcel, py::object release, double now_s);
    void put(int64_t source, PackedView parcel, Release release, double now_s);
    py::array_t<int64_t> take_chunks(int64_t stage, int64_t max_rows);
    Ref<Taken> take_rows(int64_t stage, int64_t max_rows);
    void remove_chunks(int64_t stage, py::handle chunks);
    int64_t discard(int64_t source, py::handle slots, py::handle epochs);
    // See the twin.
    bool awaits(int64_t stage, int64_t reach, double since_s) const;

    bool is_expert_stage(int64_t stage) const {
        return stage >= 0 && stage < static_cast<int64_t>(queues_.size()) && queues_[stage].experts;
    }

    template <typename F>
    void each_reference(F visit) {
        visit(chain);
        for (Queue& queue : queues_) {
            for (RowSegment& each : queue.segments) each.each_reference(visit);
        }
    }

    py::object chain;
    Fresh<int64_t> rows, oldest_decision;  // [stages]
    Fresh<double> oldest_s;                // [stages]
    int64_t total = 0, decision = 0;

  private:
    struct Chunk {
        int32_t chunk, rows;
    };
    // The stage and the time of a source's last rows; none yet: a stage below 0.
    struct Latest {
        int64_t stage = -1;
        double came_s = 0;
    };
    // So many chunks joined together.
    struct Run {
        int64_t chunks;
        double joined_s;
        int64_t joined_decision;
    };
    struct Queue {
        bool experts;
        Ring<Chunk> chunks;  // of an attention or head stage
        Ring<Run> runs;      // of these
        std::deque<RowSegment> segments;  // of an expert stage

        void push(Chunk chunk, double now_s, int64_t decision);
        // `count` chunks have joined.
        void note(int64_t count, double now_s, int64_t decision);
        Chunk pop();
    };

    int64_t layer_of(int64_t stage) const { return stage % (2 * layers_ + 1) / 2; }
    Queue& chunk_queue(int64_t stage);
    Queue& row_queue(int64_t stage);
    // `delta` rows have joined or left the stage's queue.
    void joined(int64_t stage, int64_t delta, double now_s);
    void left(int64_t stage, int64_t delta);

    std::vector<Queue> queues_;
    std::vector<Latest> latest_;  // by source
    int64_t layers_;
};

void bind_queues(py::module_& m);

}  // namespace columns
