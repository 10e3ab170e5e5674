// The home rank's part of one decoder layer: norm, attention, norm of the sum, and router.
#pragma once

#include <cstdint>

#include "attention.h"
#include "linear.h"
#include "router.h"

namespace asyncmoe {

struct HomeLayer {
    const void* norm;  // weight [hidden] of the norm before attention
    float norm_eps;
    LinearLayer qkv;
    AttentionKernel attention;
    LinearLayer out;
    const void* router_norm;  // of the norm before the router
    float router_norm_eps;
    Router router;

    bool bf16() const { return attention.bf16; }
    int64_t hidden() const { return qkv.weight.inputs; }

    // Throws std::invalid_argument if the parts do not fit each other.
    void check() const;
};

struct HomeResult {
    void* residual;    // [rows, hidden]: x + attention
    void* hidden;      // [rows, hidden]: its norm
    int64_t* experts;  // [rows, top_k]
    float* weights;    // [rows, top_k]
};

// x [rows, hidden], all elements of which lie behind each other; writes K and V.
// Throws as `AttentionKernel`.
void home_layer(const HomeLayer& layer, const PagedRows& rows, const void* x, const int64_t* angle,
                const AttentionStore& store, const HomeResult& result);

}  // namespace asyncmoe
