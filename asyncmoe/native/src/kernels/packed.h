// Weights laid out once, at load, in the order in which products read them.
//
// A panel holds 16 output columns. Beside each other lie the 16 columns' numbers for one input
// (float32), or for a pair of inputs (bfloat16, int8): [panels][inputs][16] or
// [panels][pairs][16][2]. The last panel's missing columns, and the second half of the last pair if
// the inputs are odd in number, are zeros.
#pragma once

#include <cstdint>

namespace asyncmoe {

constexpr int kPanel = 16;

enum class Storage : int { float32, bfloat16, int8 };

struct Packed {
    Storage storage;
    const char* data;
    const float* scales;  // [panels * 16], one per column: int8 alone
    int64_t columns, inputs;

    int64_t panels() const { return (columns + kPanel - 1) / kPanel; }
    int64_t steps() const { return storage == Storage::float32 ? inputs : (inputs + 1) / 2; }
    int64_t panel_bytes() const { return steps() * kPanel * (storage == Storage::int8 ? 2 : 4); }
    int64_t bytes() const { return panels() * panel_bytes(); }

    // Panels [first, end), of which there is at least one.
    Packed part(int64_t first, int64_t end) const {
        Packed some = *this;
        some.data += first * panel_bytes();
        if (scales != nullptr) some.scales += first * kPanel;
        some.columns = (end * kPanel < columns ? end * kPanel : columns) - first * kPanel;
        return some;
    }
};

// Rows for products with int8 are int16 with a scale for every so many inputs. A row is
// [blocks] scales, then [2 * steps] numbers. A block's sums fit 32 bits, so that they are exact.
constexpr int64_t kBlockInputs = 128;

inline int64_t row_blocks(int64_t inputs) { return (inputs + kBlockInputs - 1) / kBlockInputs; }

}  // namespace asyncmoe
