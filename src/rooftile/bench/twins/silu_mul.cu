// y = gate * sigmoid(gate) * up. A CTA takes THREADS * EACH vectors that lie in a row; all loads of a thread are in flight
// before the first is used.
#include "common.cuh"

template <typename T, int THREADS, int EACH>
__global__ void __launch_bounds__(THREADS)
    silu_mul(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ y, long long vectors) {
    using V = Vector<T>;
    const long long first = blockIdx.x * (long long)(THREADS * EACH);
    const long long start = first * V::COUNT;
    const int left = vectors - first < THREADS * EACH ? int(vectors - first) : THREADS * EACH;

    V g[EACH], u[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int index = i * THREADS + threadIdx.x;
        g[i] = index < left ? V::stream(gate + start, index) : V{};
        u[i] = index < left ? V::stream(up + start, index) : V{};
    }

#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int index = i * THREADS + threadIdx.x;
        float a[V::COUNT], b[V::COUNT];
        g[i].unpack(a);
        u[i].unpack(b);
#pragma unroll
        for (int j = 0; j < V::COUNT; j++) a[j] = divide_approx(a[j], 1.0f + exp2_approx(-LOG2_E * a[j])) * b[j];
        if (index < left) V::pack(a).store(y + start, index);
    }
}
