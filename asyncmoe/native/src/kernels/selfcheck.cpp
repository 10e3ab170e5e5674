#include "selfcheck.h"

#include <cmath>
#include <cstring>

#include "bf16.h"
#include "experts.h"
#include "linear.h"
#include "pack.h"

namespace asyncmoe {
namespace {

// Odd in every respect: a last panel that is not full, a pair that is not, tiles of every height,
// and of one register and of two.
constexpr int64_t kHeights[] = {1, 2, 3, 4, 5, 6, 7, 20};
constexpr int64_t kRows = 20, kInputs = 37, kColumns = 43, kWidth = 21, kExperts = 2;

// Numbers between -1 and 1, the same ones each time.
class Numbers {
   public:
    float next() {
        state_ = state_ * 1664525u + 1013904223u;
        return static_cast<float>(static_cast<int32_t>(state_)) / 2147483648.0f;
    }

   private:
    uint32_t state_ = 1;
};

Bf16 cut(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return Bf16{static_cast<uint16_t>(bits >> 16)};
}

void fill(Numbers& numbers, std::vector<float>& to) {
    for (float& x : to) x = numbers.next();
}

void fill(Numbers& numbers, std::vector<Bf16>& to) {
    for (Bf16& x : to) x = cut(numbers.next());
}

void fill(Numbers& numbers, std::vector<int8_t>& to) {
    for (int8_t& x : to) x = static_cast<int8_t>(numbers.next() * 127.0f);
}

// Weights of one or more matrices, packed, with scales for int8.
template <class T>
struct Weights {
    std::vector<char> data;
    std::vector<float> scales;
    Packed packed;

    Weights(Numbers& numbers, Storage storage, int64_t columns, int64_t inputs, int64_t count)
        : packed{storage, nullptr, nullptr, columns, inputs} {
        data.resize(count * packed.bytes());
        scales.resize(count * packed.panels() * kPanel);
        for (float& scale : scales) scale = 0.01f + 0.005f * numbers.next();
        std::vector<T> plain(columns * inputs);
        for (int64_t i = 0; i < count; ++i) {
            fill(numbers, plain);
            pack(plain.data(), columns, inputs, storage, data.data() + i * packed.bytes(), 0, 1);
        }
        packed.data = data.data();
        if (storage == Storage::int8) packed.scales = scales.data();
    }
};

template <class X, class T>
void append_products(Storage storage, std::vector<float>& results) {
    Numbers numbers;
    std::vector<X> x(kRows * kInputs);
    fill(numbers, x);
    const bool bf16 = sizeof(X) == 2;
    const Weights<T> weight(numbers, storage, kColumns, kInputs, 1);
    const LinearLayer layer{weight.packed, nullptr, bf16, false, false};
    for (const int64_t rows : kHeights) {
        std::vector<float> out(rows * kColumns);
        linear(layer, x.data(), rows, kInputs, out.data());
        results.insert(results.end(), out.begin(), out.end());
    }

    // Panels of the gate and of the up projection alternate; the second of each is not full, but
    // random numbers do as well as zeros there.
    const Weights<T> gate_up(numbers, storage, 4 * kPanel, kInputs, kExperts);
    const Weights<T> down(numbers, storage, kColumns, kWidth, kExperts);
    const ExpertsLayer experts_layer{gate_up.packed, down.packed, kExperts, Activation::silu,
                                     bf16, true};
    std::vector<int64_t> row, gather;
    std::vector<float> weights;
    for (int64_t i = 0; i < kRows; ++i) {
        row.push_back(kRows - 1 - i);
        gather.push_back(i);
        weights.push_back(0.5f + 0.25f * numbers.next());
    }
    const int64_t counts[kExperts] = {2, kRows - 2};
    std::vector<X> out(kRows * kColumns);
    experts(experts_layer, x.data(), kRows, kInputs,
            {kRows, row.data(), weights.data(), counts, gather.data(), kRows, 1}, nullptr,
            out.data());
    for (const X& value : out) {
        uint32_t bits = 0;
        std::memcpy(reinterpret_cast<char*>(&bits) + 4 - sizeof(X), &value, sizeof(X));
        float wide;
        std::memcpy(&wide, &bits, sizeof wide);
        results.push_back(wide);
    }
}

std::vector<float> results_of(Isa isa) {
    isa_in_use() = isa;
    std::vector<float> results;
    append_products<float, float>(Storage::float32, results);
    append_products<Bf16, Bf16>(Storage::bfloat16, results);
    append_products<Bf16, int8_t>(Storage::int8, results);
    append_products<float, int8_t>(Storage::int8, results);
    return results;
}

bool agree(const std::vector<float>& a, const std::vector<float>& b) {
    for (size_t i = 0; i < a.size(); ++i)
        if (!(std::fabs(a[i] - b[i]) <= 1e-4f + 0.02f * std::fabs(b[i]))) return false;
    return true;
}

}  // namespace

const char* isa_name(Isa isa) {
    constexpr const char* names[] = {"plain", "avx2", "avx512", "avx512_bf16", "amx_bf16"};
    return names[static_cast<int>(isa)];
}

std::vector<Isa> usable_isas(std::vector<std::string>& wrong) {
    const Isa before = isa_in_use();
    std::vector<Isa> usable{Isa::plain};
    const std::vector<float> expected = results_of(Isa::plain);
    for (int i = 1; i <= static_cast<int>(best_isa()); ++i) {
        const Isa isa = static_cast<Isa>(i);
        if (agree(results_of(isa), expected)) usable.push_back(isa);
        else wrong.push_back(isa_name(isa));
    }
    isa_in_use() = before;
    return usable;
}

}  // namespace asyncmoe
