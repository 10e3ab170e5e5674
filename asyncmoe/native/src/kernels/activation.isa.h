// Activations of vectors of floats.

// 1 / (1 + e^-x)
ASYNCMOE_INLINE V sigmoid(V x) {
    const V decay = exp2_of<kWidth>((x < 0.0f ? x : -x) * 1.44269504f);
    return (x < 0.0f ? decay : all<kWidth>(1.0f)) / (1.0f + decay);
}

ASYNCMOE_INLINE V gelu_of(V x) {
    float lanes[kWidth];
    store<kWidth>(lanes, x);
    for (float& v : lanes) v = 0.5f * v * (1.0f + __builtin_erff(v * 0.70710678f));
    return load<kWidth>(lanes);
}

ASYNCMOE_INLINE V activated(Activation activation, V x) {
    switch (activation) {
        case Activation::silu: return x * sigmoid(x);
        case Activation::relu: return x < 0.0f ? V{} : x;
        case Activation::gelu: return gelu_of(x);
        // 0.5 x (1 + tanh(z)) = x / (1 + e^-2z)
        case Activation::gelu_tanh: break;
    }
    return x * sigmoid((x + x * x * x * 0.044715f) * 1.59576912f);
}

// act(gate) * up, with every value in between rounded to T.
template <class T>
ASYNCMOE_INLINE V gated_of(Activation activation, V gate, V up) {
    return rounded<T, kWidth>(rounded<T, kWidth>(activated(activation, gate)) * up);
}
