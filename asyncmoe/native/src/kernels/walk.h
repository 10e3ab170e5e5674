// Decode steps of the same rows one behind the other, while nobody has to decide anything between
// them: see asyncmoe/walk.py. No step of it needs the GIL.
#pragma once

#include <unistd.h>

#include <atomic>
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

    // Goes on from rows that got tokens [turn], at most to the tokens of `steps` steps.
    // `pass(x, seconds)` takes x [rows, hidden] through the layers, and returns how many it has
    // passed of its `layers`. Of the step that is the last the loop is not told.
    template <class Pass>
    End run(int64_t turn, int64_t steps, int64_t layers, void* x, const Pass& pass) const {
        for (;;) {
            enter(tokens + turn * rows.rows, static_cast<char*>(x));
            turn = (turn + 1) % turns;
            double* const taken_s = seconds + turn * seconds_width;
            const int64_t passed = pass(x, taken_s);
            if (passed < layers) return {passed, turn};
            const double begin_s = now_s();
            const bool goes_on = speak(x, tokens + turn * rows.rows);
            taken_s[2 * layers] = now_s() - begin_s;
            if (--steps < 1 || !goes_on || is_wanted() || !may_tell()) return {passed, turn};
            __atomic_fetch_add(&counts[0], 1, __ATOMIC_RELEASE);
            const uint64_t one = 1;
            if (write(bell, &one, sizeof one) < 0) continue;  // it has been rung often enough
        }
    }

   private:
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

    // The tokens of x. Whether all rows have one that does not end them.
    bool speak(const void* x, int64_t* chosen) const {
        thread_local Scratch normed, scores;
        const int64_t count = rows.rows, vocab = tongue.vocab();
        void* const hidden = normed.take<char>(count * tongue.row_bytes());
        float* const logits = scores.take<float>(count * vocab);
        norm({x, nullptr, nullptr, tongue.norm, hidden, count, static_cast<int>(tongue.hidden()),
              tongue.norm_eps, 0},
             tongue.bf16());
        linear(tongue.head, hidden, count, tongue.hidden(), logits);
        std::atomic<bool> goes_on{true};
        Pool::mine().run(static_cast<int>(count), [&](int i) {
            const int64_t token = likeliest(logits + i * vocab, vocab);
            bad[i] = token < 0;
            chosen[i] = token < 0 ? 0 : token;
            bool ended = token < 0;
            for (int64_t j = 0; j < end_width; ++j) ended |= ends[i * end_width + j] == token;
            if (ended) goes_on.store(false, std::memory_order_relaxed);
        });
        return goes_on.load();
    }
};

}  // namespace asyncmoe
