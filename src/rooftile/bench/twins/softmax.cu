// y = exp(x - max x) / sum(exp(x - max x)) over a row, which is read once; each exponential is computed once and stays in a
// register until the sum is known.
#include "common.cuh"

template <typename T, int N, int THREADS, int ROWS>
__global__ void __launch_bounds__(THREADS* ROWS) softmax(const T* __restrict__ x, T* __restrict__ y, int rows) {
    using V = Vector<T>;
    using R = Row<T, N, THREADS, ROWS>;
    constexpr float LOWEST = -3.402823466e+38f;
    __shared__ float tops[32], sums[32];
    const R at(rows);

    V packed[R::EACH];
#pragma unroll
    for (int i = 0; i < R::EACH; i++) packed[i] = at.holds(i) ? V::stream(x + at.row * N, at.index(i)) : V{};

    float e[R::EACH][V::COUNT], top = LOWEST;
#pragma unroll
    for (int i = 0; i < R::EACH; i++) {
        packed[i].unpack(e[i]);
#pragma unroll
        for (int j = 0; j < V::COUNT; j++) top = at.holds(i) ? fmaxf(top, e[i][j]) : top;
    }
    const float shift = -LOG2_E * reduce<THREADS>(top, Maximum(), tops);

    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < R::EACH; i++) {
        float part = 0.0f;
#pragma unroll
        for (int j = 0; j < V::COUNT; j++) {
            e[i][j] = exp2_approx(fmaf(e[i][j], LOG2_E, shift));
            part += e[i][j];
        }
        sum += at.holds(i) ? part : 0.0f;
    }
    const float inverse = divide_approx(1.0f, reduce<THREADS>(sum, Sum(), sums));

#pragma unroll
    for (int i = 0; i < R::EACH; i++) {
#pragma unroll
        for (int j = 0; j < V::COUNT; j++) e[i][j] *= inverse;
        if (at.holds(i)) V::pack(e[i]).store(y + at.row * N, at.index(i));
    }
}
