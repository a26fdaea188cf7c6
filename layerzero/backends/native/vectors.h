// Vectors of float32 as the compiler has them: AVX-512, AVX2 or NEON from one source.

#pragma once

#include <cstdint>

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef float vfu __attribute__((vector_size(W * 4), aligned(4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));

inline vf load(const float* p) { return *reinterpret_cast<const vfu*>(p); }
inline void store(float* p, vf v) { *reinterpret_cast<vfu*>(p) = v; }
inline vf all(float x) { return x - vf{}; }  // x + 0 would turn -0 and cost an addition

// exp(x) for x <= 0 to about one unit in the last place; exactly 0 below -87, NaN stays NaN.
inline vf exponential(vf x) {
  const vf bounded = x < all(-87.3f) ? all(-87.3f) : x;
  const vf magic = all(12582912.0f);
  const vf n = (bounded * all(1.44269504f) + magic) - magic;
  const vf r = bounded - n * all(0.693359375f) + n * all(2.12194440e-4f);
  vf y = all(1.9875691500e-4f);
  y = y * r + all(1.3981999507e-3f);
  y = y * r + all(8.3334519073e-3f);
  y = y * r + all(4.1665795894e-2f);
  y = y * r + all(1.6666665459e-1f);
  y = y * r + all(5.0000001201e-1f);
  y = y * r * r + r + all(1.0f);
  const vi power = (__builtin_convertvector(n, vi) + 127) << 23;
  y = y * reinterpret_cast<const vf&>(power);
  y = x < all(-87.3f) ? vf{} : y;
  return x == x ? y : x;
}

}  // namespace
