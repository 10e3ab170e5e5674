// Decode steps of the same rows one behind the other, while nobody has to decide anything between
// them: see asyncmoe/walk.py. No step of it needs the GIL.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "attention.h"
#include "clock.h"
#include "likeliest.h"
#include "linear.h"
#include "norm.h"
#include "pool.h"
#include "scratch.h"

namespace asyncmoe {

// What stands before the first layer and behind the last one.
struct Tongue {
    const char* embedding;  // [vocab, hidden], in the rows' dtype
    const void* norm;       // weight [hidden]
    float norm_eps;
    LinearLayer head;  // to float32 [rows, vocab]

    bool bf16() const { return head.bf16_in; }
    int64_t hidden() const { return head.weight.inputs; }
    int64_t vocab() const { return head.weight.columns; }
    int64_t row_bytes() const { return hidden() * (bf16() ? 2 : 4); }
};

struct Walk {
    Tongue tongue;
    PagedRows rows;  // every row a segment; its columns are these:
    int64_t *positions, *cache_index, *context;
    const int64_t* ends;  // [rows, end_width]: tokens that end a row
    int64_t end_width;
    int64_t turns;    // steps that are kept: as many the loop may be behind, and one
    int64_t* tokens;  // [turns, rows]
    bool* bad;        // [rows]: of the last step; no token can be chosen
    double* seconds;  // [turns, seconds_width]: of the stages
    int64_t seconds_width;
    int64_t* counts;            // steps that the loop was told of, and has heard of
    const unsigned char* wanted;  // whether to stop before the next attention stage
    int bell;                   // eventfd that wakes the loop

    struct End {
        int64_t layers;  // that the last step has passed, all of them if it has tokens
        int64_t turn;    // which tokens and seconds are its own
    };

    bool is_wanted() const { return __atomic_load_n(wanted, __ATOMIC_RELAXED) != 0; }

    // Steps from tokens [0] on, at most `steps`, unless it `stops` before. Before each of them all
    // `fellows` must agree to go on; they speak for its rows, if nothing is broken off. `pass(x, seconds)` takes x [rows, hidden] through the layers,
    // and returns how many it has passed of its `layers`. Of the tokens of the last step that got
    // some the loop is not told, unless they are those that a step which was left began with.
    template <class Fellows, class Pass>
    End run(int64_t steps, int64_t layers, void* x, bool stops, Fellows& fellows,
            const Pass& pass) const {
        int64_t turn = 0;
        for (bool is_first = true;; is_first = false) {
            if (stops) {
                fellows.agree(true);
                return {is_first ? 0 : layers, turn};
            }
            if (!is_first) tell();
            if (!fellows.agree(false)) return {0, turn};
            if (rows.rows > 0) enter(tokens + turn * rows.rows, static_cast<char*>(x));
            turn = (turn + 1) % turns;
            double* const taken_s = seconds + turn * seconds_width;
            const int64_t passed = pass(x, taken_s);
            if (passed < layers) return {passed, turn};
            const double begin_s = now_s();
            int64_t* const chosen = tokens + turn * rows.rows;
            if (!fellows.speak(*this, x, chosen)) return {0, turn};
            taken_s[2 * layers] = now_s() - begin_s;
            stops = --steps < 1 || any_ends(chosen) || is_wanted();
            while (!stops && !may_tell()) {
                if (!fellows.waits() || is_wanted()) stops = true;
                else sched_yield();
            }
        }
    }

    // The final norm of x [rows, hidden].
    void norm_rows(const void* x, void* out) const {
        norm({x, nullptr, nullptr, tongue.norm, out, rows.rows, static_cast<int>(tongue.hidden()),
              tongue.norm_eps, 0},
             tongue.bf16());
    }

    // The tokens of x [rows, hidden].
    void speak(const void* x, int64_t* chosen) const {
        thread_local Scratch normed, scores;
        const int64_t count = rows.rows, vocab = tongue.vocab();
        void* const hidden = normed.take<char>(count * tongue.row_bytes());
        float* const logits = scores.take<float>(count * vocab);
        norm_rows(x, hidden);
        linear(tongue.head, hidden, count, tongue.hidden(), logits);
        Pool::mine().run(static_cast<int>(count), [&](int i) {
            choose(i, likeliest(logits + i * vocab, vocab), chosen);
        });
    }

    // What a row has got; negative: no token can be chosen.
    void choose(int64_t row, int64_t token, int64_t* chosen) const {
        bad[row] = token < 0;
        chosen[row] = token < 0 ? 0 : token;
    }

   private:
    // The loop, of the last step.
    void tell() const {
        if (rows.rows == 0) return;
        __atomic_fetch_add(&counts[0], 1, __ATOMIC_RELEASE);
        const uint64_t one = 1;
        if (write(bell, &one, sizeof one) < 0) return;  // it has been rung often enough
    }

    // Whether the loop has heard of so many steps that the next one has a place.
    bool may_tell() const {
        return counts[0] - __atomic_load_n(&counts[1], __ATOMIC_ACQUIRE) < turns - 1;
    }

    // The rows' next step: its columns, and x.
    void enter(const int64_t* given, char* x) const {
        const int64_t size = rows.block_tokens, bytes = tongue.row_bytes();
        for (int64_t i = 0; i < rows.rows; ++i) {
            const int64_t position = ++positions[i], block = position / size;
            if (position < 0 || block >= rows.table_width)
                throw std::out_of_range("a row has no more blocks");
            if (given[i] < 0 || given[i] >= tongue.vocab()) throw std::out_of_range("token");
            context[i] = position + 1;
            cache_index[i] = rows.table[i * rows.table_width + block] * size + position % size;
            std::memcpy(x + i * bytes, tongue.embedding + given[i] * bytes, bytes);
        }
    }

    // Whether one of the rows does by its token, or has none.
    bool any_ends(const int64_t* chosen) const {
        for (int64_t i = 0; i < rows.rows; ++i) {
            const int64_t* const own = ends + i * end_width;
            if (bad[i] || std::find(own, own + end_width, chosen[i]) != own + end_width) return true;
        }
        return false;
    }
};

// Whom a rank that holds all experts asks.
struct Nobody {
    bool agree(bool stops) const { return !stops; }
    bool waits() const { return false; }  // until the loop has heard enough
    bool speak(const Walk& walk, const void* x, int64_t* chosen) const {
        walk.speak(x, chosen);
        return true;
    }
};

}  // namespace asyncmoe
