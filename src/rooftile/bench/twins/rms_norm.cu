// y = x / sqrt(mean(x^2) + eps) * weight, rounded before the weight as Llama does. A row is read once and stays packed in
// registers; the weight is on its way while the row is summed.
#include "common.cuh"

template <typename T, int N, int THREADS, int ROWS>
__global__ void __launch_bounds__(THREADS* ROWS)
    rms_norm(const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y, int rows, float eps) {
    using V = Vector<T>;
    using R = Row<T, N, THREADS, ROWS>;
    __shared__ float sums[32];
    const R at(rows);

    V u[R::EACH], w[R::EACH];
#pragma unroll
    for (int i = 0; i < R::EACH; i++) u[i] = at.holds(i) ? V::stream(x + at.row * N, at.index(i)) : V{};
#pragma unroll
    for (int i = 0; i < R::EACH; i++) w[i] = at.holds(i) ? V::load(weight, at.index(i)) : V{};

    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < R::EACH; i++) {
        float numbers[V::COUNT], part = 0.0f;
        u[i].unpack(numbers);
#pragma unroll
        for (int j = 0; j < V::COUNT; j++) part = fmaf(numbers[j], numbers[j], part);
        sum += part;
    }
    const float scale = rsqrtf(reduce<THREADS>(sum, Sum(), sums) * (1.0f / N) + eps);

#pragma unroll
    for (int i = 0; i < R::EACH; i++) {
        float numbers[V::COUNT];
        u[i].unpack(numbers);
#pragma unroll
        for (int j = 0; j < V::COUNT; j++) numbers[j] *= scale;
        if (at.holds(i)) (V::pack(numbers) * w[i]).store(y + at.row * N, at.index(i));
    }
}
