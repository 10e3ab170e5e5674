#include "homelayer.h"

#include <stdexcept>

#include "norm.h"
#include "scratch.h"

namespace asyncmoe {

void HomeLayer::check() const {
    const AttentionLayer& heads = attention.layer;
    const auto fits = [&](const LinearLayer& product) {
        return product.bf16_in == bf16() && product.bf16_out == bf16();
    };
    if (!fits(qkv) || !fits(out) || router.bf16 != bf16() ||
        qkv.weight.columns != heads.row_width() ||
        out.weight.inputs != int64_t{heads.heads} * heads.dim || out.weight.columns != hidden() ||
        router.call.hidden != hidden())
        throw std::invalid_argument("the parts of a layer do not fit each other");
}

void home_layer(const HomeLayer& layer, const PagedRows& rows, const void* x, const int64_t* angle,
                const AttentionStore& store, const HomeResult& result) {
    thread_local Scratch products, attended;
    const int64_t count = rows.rows, hidden = layer.hidden(), mixed = layer.out.weight.inputs;
    const int64_t item = layer.bf16() ? 2 : 4;
    const int width = static_cast<int>(hidden);
    void* qkv = products.take<char>(count * layer.qkv.weight.columns * item);
    void* heads = attended.take<char>(count * mixed * item);
    norm({x, nullptr, nullptr, layer.norm, result.hidden, count, width, layer.norm_eps, 0},
         layer.bf16());
    linear(layer.qkv, result.hidden, count, hidden, qkv);
    layer.attention(rows, angle, qkv, heads, store);
    linear(layer.out, heads, count, mixed, result.residual);
    norm({x, result.residual, result.residual, layer.router_norm, result.hidden, count, width,
          layer.router_norm_eps, 0},
         layer.bf16());
    layer.router(result.hidden, count, result.experts, result.weights);
}

}  // namespace asyncmoe
