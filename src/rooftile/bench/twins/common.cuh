// Vectors of 16 bytes, and reductions over the threads of a row. CUDA's headers are not needed: not all machines with
// NVRTC have them.
#pragma once

struct bf16 {
    unsigned short bits;
};
struct fp16 {
    unsigned short bits;
};
using fp32 = float;

// The numbers of a 32-bit word in float32, and back, rounded to nearest even. `multiply` rounds each product once.
template <typename T>
struct Word;

template <>
struct Word<fp32> {
    static constexpr int COUNT = 1;
    static __device__ void unpack(unsigned word, float* x) { x[0] = __uint_as_float(word); }
    static __device__ unsigned pack(const float* x) { return __float_as_uint(x[0]); }
    static __device__ unsigned multiply(unsigned a, unsigned b) {
        return __float_as_uint(__uint_as_float(a) * __uint_as_float(b));
    }
};

template <>
struct Word<fp16> {
    static constexpr int COUNT = 2;
    static __device__ void unpack(unsigned word, float* x) {
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
            : "=f"(x[0]), "=f"(x[1]) : "r"(word));
    }
    static __device__ unsigned pack(const float* x) {
        unsigned word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(x[1]), "f"(x[0]));
        return word;
    }
    static __device__ unsigned multiply(unsigned a, unsigned b) {
        unsigned product;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
        return product;
    }
};

template <>
struct Word<bf16> {
    static constexpr int COUNT = 2;
    static __device__ void unpack(unsigned word, float* x) {
        x[0] = __uint_as_float(word << 16);
        x[1] = __uint_as_float(word & 0xffff0000u);
    }
    static __device__ unsigned pack(const float* x) {
        unsigned word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(x[1]), "f"(x[0]));
        return word;
    }
    static __device__ unsigned multiply(unsigned a, unsigned b) {  // sm_80 has no mul.bf16x2; the sum adds -0
        unsigned product;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
        return product;
    }
};

template <typename T>
struct alignas(16) Vector {
    static constexpr int COUNT = 16 / sizeof(T);
    unsigned words[4];

    // What many CTAs read stays in the L1. As a read-only load (.nc) the assembler would move it behind the reduction that
    // follows, and its latency would show.
    static __device__ Vector load(const T* base, int i) {
        Vector v;
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
            : "l"(reinterpret_cast<const Vector*>(base) + i) : "memory");
        return v;
    }

    // What is read once.
    static __device__ Vector stream(const T* base, int i) {
        Vector v;
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
            : "l"(reinterpret_cast<const Vector*>(base) + i));
        return v;
    }

    __device__ void store(T* base, int i) const { reinterpret_cast<Vector*>(base)[i] = *this; }

    __device__ void unpack(float (&x)[COUNT]) const {
#pragma unroll
        for (int j = 0; j < 4; j++) Word<T>::unpack(words[j], x + j * Word<T>::COUNT);
    }

    static __device__ Vector pack(const float (&x)[COUNT]) {
        Vector v;
#pragma unroll
        for (int j = 0; j < 4; j++) v.words[j] = Word<T>::pack(x + j * Word<T>::COUNT);
        return v;
    }

    __device__ Vector operator*(const Vector& other) const {
        Vector v;
#pragma unroll
        for (int j = 0; j < 4; j++) v.words[j] = Word<T>::multiply(words[j], other.words[j]);
        return v;
    }
};

constexpr float LOG2_E = 1.44269504088896340736f;

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float divide_approx(float a, float b) {  // to two units in the last place
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};
struct Maximum {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Over the THREADS threads of a row; each of them gets the result. A row of several warps has the CTA to itself, and
// `shared` is used once.
template <int THREADS, typename Operation>
__device__ __forceinline__ float reduce(float x, Operation operation, float* shared) {
#pragma unroll
    for (int offset = (THREADS < 32 ? THREADS : 32) / 2; offset > 0; offset /= 2)
        x = operation(x, __shfl_xor_sync(0xffffffffu, x, offset));
    if constexpr (THREADS > 32) {
        constexpr int WARPS = THREADS / 32;
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
        __syncthreads();
        x = shared[threadIdx.x % WARPS];
#pragma unroll
        for (int offset = WARPS / 2; offset > 0; offset /= 2)
            x = operation(x, __shfl_xor_sync(0xffffffffu, x, offset));
    }
    return x;
}

// The vectors of a row of N numbers, shared out among its THREADS threads, and the rows of a CTA.
template <typename T, int N, int THREADS, int ROWS>
struct Row {
    static constexpr int VECTORS = N / Vector<T>::COUNT;
    static constexpr int EACH = (VECTORS + THREADS - 1) / THREADS;
    static_assert(N % Vector<T>::COUNT == 0, "a row is not a whole number of vectors");
    static_assert(ROWS == 1 || THREADS <= 32, "a row of several warps has the CTA to itself");

    const int lane = threadIdx.x % THREADS;
    const long long row = blockIdx.x * (long long)ROWS + threadIdx.x / THREADS;
    const bool is_row;

    __device__ explicit Row(int rows) : is_row(row < rows) {}
    __device__ int index(int i) const { return i * THREADS + lane; }
    __device__ bool holds(int i) const {
        return (ROWS == 1 || is_row) && (VECTORS % THREADS == 0 || index(i) < VECTORS);
    }
};
