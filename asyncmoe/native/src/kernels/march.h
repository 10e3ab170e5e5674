// A march: decode steps that ranks of one machine take together, each with rows of its own and its
// share of the experts (asyncmoe/march.py). What rows need of another rank goes through memory that
// the two share, without a queue, a loop or the GIL in between.
#pragma once

#include <cstdint>
#include <vector>

#include "clock.h"
#include "layers.h"
#include "walk.h"

namespace asyncmoe {

// How a rank divides its half of the memory that it shares with a fellow. It alone writes there:
//   head     its last note, the last march that it broke off, its rows, whether it stops
//   hidden, experts, weights   [rows, …]: what its routers chose for its own rows
//   parts    [rows, hidden]: sums of its experts for the fellow's rows
// Behind the layers, `hidden` is for the head, and where the parts were stands the best token that
// its share of the vocabulary has for each of the fellow's rows.
struct MarchForm {
    int64_t rows;  // the most that a rank has
    int64_t row_bytes, top_k;

    static constexpr int64_t kHead = 64;

    int64_t experts_at() const { return kHead + lines(rows * row_bytes); }
    int64_t weights_at() const { return experts_at() + lines(rows * top_k * 8); }
    int64_t parts_at() const { return weights_at() + lines(rows * top_k * 4); }
    int64_t bytes() const { return parts_at() + lines(rows * row_bytes); }

   private:
    static int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }
};

// Two halves; both are null where a rank would stand for itself.
struct Fellow {
    char* mine;
    const char* theirs;
};

// What a rank has computed in a march: sums by kind of stage, in its order on the chain. The loop
// reads them meanwhile.
struct Tally {
    enum Kind { kAttention, kExpert, kHead };
    int64_t *batches, *rows;  // [3]
    double* seconds;          // [3]
    double* waited_s;         // for other ranks

    // A piece of work on so many rows, which may be none.
    void add(Kind kind, int64_t count, double more_s) const {
        batches[kind] += count > 0;
        rows[kind] += count;
        seconds[kind] += more_s;
    }
};

// One march on one rank. Every rank of it leaves the same notes in the same order, and reads what
// stands behind a note once it is there. It writes there again only when all have answered with
// their next one, so that nobody's memory changes while it is read.
class March {
   public:
    // `fellows`: of all ranks, by rank. `number`: of the march, greater than that of any before.
    // `owner`: [layers, ids] rank of each expert. `broken`: set from elsewhere once it is to be
    // broken off at once. Throws std::invalid_argument.
    March(int64_t number, int64_t rank, std::vector<Fellow> fellows, const MarchForm& form,
          const uint16_t* owner, int64_t ids, const unsigned char* broken, const Tally& tally);

    // Decode steps of `walk` from its tokens [0] on, the columns of which are one behind, until a
    // rank stops. Of a march that was broken off, or that another rank has ended, no layer of the
    // last step is passed.
    Walk::End run(const Walk& walk, const Layers& layers, const LayerMemory* memory, void* x,
                  int64_t steps);

    // Whether `run` has ended because a rank stopped, of which all ranks hear from that one. If not,
    // others may wait for this one still: it has to leave the march, by its word.
    bool has_ended() const { return has_ended_; }

    // What `Walk::run` asks.
    bool agree(bool stops);
    bool waits() const { return !is_broken(); }
    bool speak(const Walk& walk, const void* x, int64_t* chosen);

   private:
    // The rows of all ranks, by rank, and memory for what the experts here give for them.
    struct Gathered {
        int64_t rows;
        const char* hidden;
        const int64_t* experts;
        const float* weights;
        char* sums;
    };

    // When a piece of work began, and how long this rank had waited by then.
    struct Lap {
        double begin_s, waited_s;
    };

    bool pass(const Walk& walk, const Layers& layers, const LayerMemory* memory, void* x);
    Lap lap() const { return {now_s(), *tally_.waited_s}; }
    double worked_s(const Lap& since) const {
        return now_s() - since.begin_s - (*tally_.waited_s - since.waited_s);
    }
    void check(const Walk& walk, const Layers& layers) const;
    void sum(const PassageLayer& layer, const LayerMemory& memory, const Gathered& all) const;
    void merge_parts(const HomeResult& own, const uint16_t* owner, const Gathered& all, bool bf16,
                     void* out) const;

    int64_t first_row() const;
    int64_t all_rows() const;
    int64_t rows_here(const Gathered& all, const LayerMemory& memory) const;
    void hand_out(const void* column, int64_t to, int64_t row_bytes) const;
    void hand_back(const void* all, int64_t row_bytes);
    template <class T>
    T* gather(Scratch& space, const void* own, int64_t from, int64_t row_bytes) const;
    Gathered gather_rows(const HomeResult& own) const;
    void note();
    bool await() const;
    bool sees_notes(const char* theirs) const;
    bool is_broken() const { return __atomic_load_n(broken_, __ATOMIC_RELAXED) != 0; }

    const uint64_t number_;
    const int64_t rank_;
    const std::vector<Fellow> fellows_;
    const MarchForm form_;
    const uint16_t* const owner_;
    const int64_t ids_;
    const unsigned char* const broken_;
    const Tally tally_;
    std::vector<int64_t> rows_;  // of each rank
    uint64_t notes_;
    bool has_ended_ = false;
};

}  // namespace asyncmoe
