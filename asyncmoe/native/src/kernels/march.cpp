#include "march.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "likeliest.h"
#include "merge.h"
#include "pool.h"
#include "scratch.h"

namespace asyncmoe {
namespace {

constexpr int kPatience = 2000;  // looks before others may have the core
// A note is the number of its march, and in the low bits how many notes of that went before it.
constexpr int kNoteBits = 24, kNumberBits = 64 - kNoteBits;

// The head of a half.
enum Word { kNote, kLeft, kRows, kStops };

uint64_t read(const char* half, Word word) {
    return __atomic_load_n(reinterpret_cast<const uint64_t*>(half) + word, __ATOMIC_ACQUIRE);
}

void write(char* half, Word word, uint64_t value) {
    __atomic_store_n(reinterpret_cast<uint64_t*>(half) + word, value, __ATOMIC_RELEASE);
}

// The best token of a part of the vocabulary for a row.
struct Best {
    float score;  // NaN if one is
    int32_t token;
};

Best best_of(const float* scores, int64_t count, int64_t first) {
    const int64_t found = likeliest(scores, count);
    if (found >= 0) return {scores[found], static_cast<int32_t>(first + found)};
    const float* const most = std::max_element(scores, scores + count);
    const bool has_nan = std::any_of(scores, scores + count, [](float x) { return x != x; });
    return {has_nan ? std::numeric_limits<float>::quiet_NaN() : *most,
            static_cast<int32_t>(first + (most - scores))};
}

void find_best(const LinearLayer& head, const void* hidden, int64_t rows, int64_t first,
               Best* best) {
    thread_local Scratch space;
    const int64_t columns = head.weight.columns;
    float* const scores = space.take<float>(rows * columns);
    linear(head, hidden, rows, head.weight.inputs, scores);
    Pool::mine().run(static_cast<int>(rows), [&](int i) {
        best[i] = best_of(scores + i * columns, columns, first);
    });
}

// Memory that the layers of all marches of a thread use again.
struct Workspace {
    Scratch hidden, experts, weights, sums, parts, slots, counts, normed, best;

    static Workspace& mine() {
        thread_local Workspace workspace;
        return workspace;
    }
};

}  // namespace

March::March(int64_t number, int64_t rank, std::vector<Fellow> fellows, const MarchForm& form,
             const uint16_t* owner, int64_t ids, const unsigned char* broken, const Tally& tally)
    : number_(static_cast<uint64_t>(number)),
      rank_(rank),
      fellows_(std::move(fellows)),
      form_(form),
      owner_(owner),
      ids_(ids),
      broken_(broken),
      tally_(tally),
      rows_(fellows_.size()),
      notes_(number_ << kNoteBits) {
    const auto size = static_cast<int64_t>(fellows_.size());
    bool good = number > 0 && number < int64_t{1} << kNumberBits && rank >= 0 && rank < size &&
                size < 256;
    for (int64_t other = 0; good && other < size; ++other) {
        const Fellow& fellow = fellows_[other];
        good = (fellow.mine == nullptr) == (other == rank) &&
               (fellow.theirs == nullptr) == (other == rank);
    }
    if (!good) throw std::invalid_argument("no such march");
}

void March::check(const Walk& walk, const Layers& layers) const {
    bool good = layers.count() > 0 && walk.seconds_width == 2 * layers.count() + 1 &&
                walk.rows.rows <= form_.rows &&
                form_.row_bytes >= static_cast<int64_t>(sizeof(Best));
    for (const PassageLayer& layer : layers.all)
        good = good && layer.row_bytes() == form_.row_bytes && layer.top_k() == form_.top_k &&
               layer.home.bf16() == walk.tongue.bf16();
    if (!good || walk.tongue.row_bytes() != form_.row_bytes)
        throw std::invalid_argument("the layers do not fit the march");
}

Walk::End March::run(const Walk& walk, const Layers& layers, const LayerMemory* memory, void* x,
                     int64_t steps) {
    check(walk, layers);
    rows_[rank_] = walk.rows.rows;
    const auto through = [&](void* rows, double*) {
        return pass(walk, layers, memory, rows) ? layers.count() : 0;
    };
    const int64_t notes = 2 * layers.count() + 3;  // of a step, with the next one's agreement
    steps = std::min(steps, (int64_t{1} << kNoteBits) / notes - 1);  // the next march goes on
    return walk.run(steps, layers.count(), x, walk.is_wanted(), *this, through);
}

bool March::agree(bool stops) {
    for (const Fellow& fellow : fellows_) {
        if (fellow.mine == nullptr) continue;
        write(fellow.mine, kRows, rows_[rank_]);
        write(fellow.mine, kStops, stops);
    }
    note();
    has_ended_ = stops;
    if (stops || !await()) return false;
    for (size_t other = 0; other < fellows_.size(); ++other) {
        const char* const theirs = fellows_[other].theirs;
        if (theirs == nullptr) continue;
        const uint64_t rows = read(theirs, kRows);
        if (rows > static_cast<uint64_t>(form_.rows))
            throw std::out_of_range("a rank marches with more rows than its memory has");
        rows_[other] = static_cast<int64_t>(rows);
        has_ended_ = has_ended_ || read(theirs, kStops) != 0;
    }
    has_ended_ = has_ended_ || all_rows() == 0;  // all have left meanwhile: nobody would end it
    return !has_ended_;
}

bool March::pass(const Walk& walk, const Layers& layers, const LayerMemory* memory, void* x) {
    const int64_t own_rows = walk.rows.rows;
    for (int64_t i = 0; i < layers.count(); ++i) {
        const PassageLayer& layer = layers.all[i];
        const HomeResult own = layer.results(own_rows);
        const Lap home = lap();
        if (own_rows > 0)
            home_layer(layer.home, walk.rows, x, walk.positions, memory[i].store(), own);
        hand_out(own.hidden, MarchForm::kHead, form_.row_bytes);
        hand_out(own.experts, form_.experts_at(), form_.top_k * 8);
        hand_out(own.weights, form_.weights_at(), form_.top_k * 4);
        note();
        tally_.add(Tally::kAttention, own_rows, worked_s(home));
        const Lap experts = lap();
        if (!await()) return false;
        const Gathered all = gather_rows(own);
        sum(layer, memory[i], all);
        hand_back(all.sums, form_.row_bytes);
        if (!await()) return false;
        merge_parts(own, owner_ + i * ids_, all, layer.home.bf16(), x);
        tally_.add(Tally::kExpert, rows_here(all, memory[i]), worked_s(experts));
    }
    return true;
}

// A column of this rank's rows, to all others.
void March::hand_out(const void* column, int64_t to, int64_t row_bytes) const {
    const int64_t bytes = rows_[rank_] * row_bytes;
    for (const Fellow& fellow : fellows_)
        if (fellow.mine != nullptr && bytes > 0) std::memcpy(fellow.mine + to, column, bytes);
}

// The first of this rank's rows among all.
int64_t March::first_row() const {
    return std::accumulate(rows_.begin(), rows_.begin() + rank_, int64_t{0});
}

int64_t March::all_rows() const {
    return std::accumulate(rows_.begin(), rows_.end(), int64_t{0});
}

// Columns of all ranks' rows, behind each other: `own` of this rank, at `from` in others' halves.
template <class T>
T* March::gather(Scratch& space, const void* own, int64_t from, int64_t row_bytes) const {
    T* const all = space.take<T>(all_rows() * row_bytes / static_cast<int64_t>(sizeof(T)));
    char* next = reinterpret_cast<char*>(all);
    for (size_t rank = 0; rank < fellows_.size(); ++rank) {
        const char* const theirs = fellows_[rank].theirs;
        const int64_t bytes = rows_[rank] * row_bytes;
        if (bytes > 0) std::memcpy(next, theirs == nullptr ? own : theirs + from, bytes);
        next += bytes;
    }
    return all;
}

March::Gathered March::gather_rows(const HomeResult& own) const {
    Workspace& space = Workspace::mine();
    const int64_t k = form_.top_k;
    return {all_rows(),
            gather<char>(space.hidden, own.hidden, MarchForm::kHead, form_.row_bytes),
            gather<int64_t>(space.experts, own.experts, form_.experts_at(), k * 8),
            gather<float>(space.weights, own.weights, form_.weights_at(), k * 4),
            space.sums.take<char>(all_rows() * form_.row_bytes)};
}

// What the experts here give for the rows of all ranks.
void March::sum(const PassageLayer& layer, const LayerMemory& memory, const Gathered& all) const {
    routed_experts(layer.experts, all.hidden, all.rows, layer.home.hidden(),
                   {all.experts, all.weights, form_.top_k, memory.local_ids(), memory.ids},
                   /*all_here=*/false, nullptr, all.sums);
}

// How many of all rows have an expert here.
int64_t March::rows_here(const Gathered& all, const LayerMemory& memory) const {
    const int64_t k = form_.top_k;
    int64_t found = 0;
    for (int64_t i = 0; i < all.rows; ++i)
        found += std::any_of(all.experts + i * k, all.experts + (i + 1) * k,
                             [&](int64_t id) { return memory.local_ids()[id] >= 0; });
    return found;
}

// To each rank what `all` has for its rows.
void March::hand_back(const void* all, int64_t row_bytes) {
    const char* next = static_cast<const char*>(all);
    for (size_t rank = 0; rank < fellows_.size(); next += rows_[rank++] * row_bytes) {
        char* const mine = fellows_[rank].mine;
        if (mine != nullptr) std::memcpy(mine + form_.parts_at(), next, rows_[rank] * row_bytes);
    }
    note();
}

// Residual and parts of this rank's rows, summed as rows that went through the queues are: a part
// of each rank that has experts of the row, by rank.
void March::merge_parts(const HomeResult& own, const uint16_t* owner, const Gathered& all,
                        bool bf16, void* out) const {
    Workspace& space = Workspace::mine();
    const int64_t rows = rows_[rank_], k = form_.top_k, bytes = form_.row_bytes;
    if (rows == 0) return;
    char* const parts = space.parts.take<char>(rows * k * bytes);
    int64_t* const slots = space.slots.take<int64_t>(rows);
    uint8_t* const counts = space.counts.take<uint8_t>(rows);
    const char* const sums = all.sums + first_row() * bytes;
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t* const chosen = own.experts + i * k;
        slots[i] = i;
        counts[i] = 0;
        for (size_t rank = 0; rank < fellows_.size(); ++rank) {
            const auto here = [&](int64_t id) { return owner[id] == rank; };
            if (std::none_of(chosen, chosen + k, here)) continue;
            const char* const theirs = fellows_[rank].theirs;
            const char* const from = theirs == nullptr ? sums : theirs + form_.parts_at();
            std::memcpy(parts + (i * k + counts[i]++) * bytes, from + i * bytes, bytes);
        }
    }
    const int width = static_cast<int>(bytes / (bf16 ? 2 : 4));
    merge({own.residual, parts, slots, counts, out, rows, rows, static_cast<int>(k), width, 0},
          bf16);
}

// Each rank reads its share of the head, for the rows of all.
bool March::speak(const Walk& walk, const void* x, int64_t* chosen) {
    Workspace& space = Workspace::mine();
    const Lap begin = lap();
    const int64_t rows = all_rows(), ranks = static_cast<int64_t>(fellows_.size());
    const LinearLayer& head = walk.tongue.head;
    const int64_t panels = head.weight.panels();
    const int64_t first = panels * rank_ / ranks, end = panels * (rank_ + 1) / ranks;
    void* const normed = space.normed.take<char>(rows_[rank_] * form_.row_bytes);
    walk.norm_rows(x, normed);
    hand_out(normed, MarchForm::kHead, form_.row_bytes);
    note();
    if (!await()) return false;
    const char* const hidden =
        gather<char>(space.hidden, normed, MarchForm::kHead, form_.row_bytes);
    Best* const best = space.best.take<Best>(rows);
    if (first == end) std::fill(best, best + rows, Best{-INFINITY, 0});
    else find_best(head.part(first, end), hidden, rows, first * kPanel, best);
    hand_back(best, sizeof(Best));
    if (!await()) return false;
    for (int64_t i = 0; i < rows_[rank_]; ++i) {
        Best most{-INFINITY, 0};
        bool is_nan = false;
        for (int64_t rank = 0; rank < ranks; ++rank) {
            const char* const theirs = fellows_[rank].theirs;
            Best here = best[first_row() + i];
            if (theirs != nullptr)
                std::memcpy(&here, theirs + form_.parts_at() + i * sizeof here, sizeof here);
            is_nan = is_nan || here.score != here.score;
            if (here.score > most.score) most = here;
        }
        const bool is_bad = is_nan || !(most.score - most.score == 0);
        if (most.token < 0 || most.token >= walk.tongue.vocab())
            throw std::out_of_range("a rank has found a token that is none");
        walk.choose(i, is_bad ? -1 : most.token, chosen);
    }
    tally_.add(Tally::kHead, rows, worked_s(begin));
    return true;
}

void March::note() {
    ++notes_;
    for (const Fellow& fellow : fellows_)
        if (fellow.mine != nullptr) write(fellow.mine, kNote, notes_);
}

// Whether all others have left as many notes, and so may be read.
bool March::await() const {
    const double begin_s = now_s();
    const bool all = std::all_of(fellows_.begin(), fellows_.end(), [this](const Fellow& fellow) {
        return fellow.theirs == nullptr || sees_notes(fellow.theirs);
    });
    *tally_.waited_s += now_s() - begin_s;
    return all;
}

bool March::sees_notes(const char* theirs) const {
    int looks = 0;
    while (read(theirs, kNote) < notes_) {
        if (is_broken() || read(theirs, kLeft) == number_) return false;
        if (looks == kPatience) {
            sched_yield();
        } else {
            ++looks;
            cpu_relax();
        }
    }
    return true;
}

}  // namespace asyncmoe
