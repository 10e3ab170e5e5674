// Routing: softmax over the gate's logits, the k largest, their weights.
#pragma once

#include <cstdint>

namespace asyncmoe {

struct RouteCall {
    const void* x;      // [rows, hidden]
    const float* gate;  // [hidden, columns]
    const float* bias;  // [columns]; -inf for the columns past the experts
    int hidden, columns, experts, top_k;
    bool renormalise, round;  // `round` the weights to bfloat16
    int64_t* chosen;          // [rows, top_k]
    float* weights;           // [rows, top_k]
};

struct Router {
    RouteCall call;  // but for what changes from call to call
    bool bf16;       // the rows are bfloat16, else float32

    void operator()(const void* x, int64_t rows, int64_t* chosen, float* weights) const;
};

}  // namespace asyncmoe
