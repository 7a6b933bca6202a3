// (a, b) -> (a * cos - b * sin, b * cos + a * sin) for a = x[i], b = x[i + D / 2], of q and k of shape (tokens, heads, D) in one
// launch. A thread has the same columns of EACH heads of a token, so that it reads its cos and sin once. The grid is
// (groups of heads, tokens).
#include "common.cuh"

template <typename T, int D, int THREADS, int EACH>
__global__ void __launch_bounds__(THREADS)
    rope(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ cos, const T* __restrict__ sin,
         T* __restrict__ q_out, T* __restrict__ k_out, int q_heads, int k_heads) {
    using V = Vector<T>;
    constexpr int LANES = D / 2 / V::COUNT;  // threads of a head
    constexpr int HEADS = THREADS / LANES;   // heads of the CTA at a time
    static_assert(D / 2 % V::COUNT == 0 && THREADS % LANES == 0, "half of a head is not a whole number of vectors");
    const int lane = threadIdx.x % LANES;
    const int first = blockIdx.x * (HEADS * EACH) + threadIdx.x / LANES;
    const long long token = blockIdx.y;

    V a[EACH], b[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int head = first + i * HEADS;
        const T* from = head < q_heads ? q + (token * q_heads + head) * D : k + (token * k_heads + head - q_heads) * D;
        const bool is_head = head < q_heads + k_heads;
        a[i] = is_head ? V::stream(from, lane) : V{};
        b[i] = is_head ? V::stream(from + D / 2, lane) : V{};
    }
    float c[V::COUNT], s[V::COUNT];
    V::load(cos + token * D, lane).unpack(c);
    V::load(sin + token * D, lane).unpack(s);

#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int head = first + i * HEADS;
        T* to = head < q_heads ? q_out + (token * q_heads + head) * D : k_out + (token * k_heads + head - q_heads) * D;
        float x[V::COUNT], y[V::COUNT], turned_x[V::COUNT], turned_y[V::COUNT];
        a[i].unpack(x);
        b[i].unpack(y);
#pragma unroll
        for (int j = 0; j < V::COUNT; j++) {
            turned_x[j] = x[j] * c[j] - y[j] * s[j];
            turned_y[j] = y[j] * c[j] + x[j] * s[j];
        }
        if (head < q_heads + k_heads) {
            V::pack(turned_x).store(to, lane);
            V::pack(turned_y).store(to + D / 2, lane);
        }
    }
}
