// Numbers of 16 and 8 bits as float32, and float32 as codes of 8 bits.
//
// A code times its scale is the number. Codes are rounded half to even; what lies beyond the format is clamped, NaN
// is code 0: formats/elements.py, encode_values. Bits are moved by integers, so that flushed subnormals change nothing.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>

#include "vectors.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2), aligned(2)));
typedef uint8_t vb __attribute__((vector_size(W), aligned(1)));
typedef int8_t vc __attribute__((vector_size(W), aligned(1)));

struct BF16 { uint16_t bits; };

inline void widen(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * 4); }
inline void widen(const BF16* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const vh half = *reinterpret_cast<const vh*>(from + i);
    const vu bits = __builtin_convertvector(half, vu) << 16;
    store(to + i, reinterpret_cast<const vf&>(bits));
  }
  for (; i < n; ++i) {
    const uint32_t bits = uint32_t(from[i].bits) << 16;
    std::memcpy(to + i, &bits, 4);
  }
}
inline void widen(const _Float16* from, float* to, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
  for (; i < n; ++i) to[i] = float(from[i]);
}

inline void widen_any(const void* from, at::ScalarType type, float* to, int64_t n) {
  if (type == at::kFloat) widen(static_cast<const float*>(from), to, n);
  else if (type == at::kBFloat16) widen(static_cast<const BF16*>(from), to, n);
  else widen(static_cast<const _Float16*>(from), to, n);
}


inline vf as_floats(vu bits) { return reinterpret_cast<const vf&>(bits); }
inline vu as_bits(vf x) { return reinterpret_cast<const vu&>(x); }

// Codes of eight bits of floating point, whose exponent is BIAS above its own; E4M3 has no infinity.
template <int MANTISSA, int BIAS>
struct Float8 {
  uint8_t bits;
  static constexpr bool FINITE = MANTISSA == 3;
  static constexpr float LARGEST = FINITE ? 448.0f : 57344.0f;
  static constexpr int SHIFT = 23 - MANTISSA;  // from a mantissa of 23 bits
  static constexpr uint32_t REBIASED = uint32_t(127 - BIAS) << 23, SMALLEST = 1u << MANTISSA;  // no subnormal
  static constexpr float UNIT = FINITE ? 0x1p-9f : 0x1p-16f;  // of subnormals
  static constexpr float ROUNDING = FINITE ? 0x1p14f : 0x1p7f;  // where float32 has that unit
  static vf decoded(const Float8* from) {
    const vu x = __builtin_convertvector(*reinterpret_cast<const vb*>(from), vu), size = x & 0x7fu;
    const vf small = __builtin_convertvector(reinterpret_cast<const vi&>(size), vf) * all(UNIT);
    vu bits = size < SMALLEST ? as_bits(small) : (size << SHIFT) + REBIASED;
    if constexpr (FINITE) bits = size == 0x7fu ? vu{} + 0x7fc00000u : bits;
    else bits = size >= 0x7cu ? 0x7f800000u | size << SHIFT : bits;
    return as_floats(bits | (x & 0x80u) << 24);
  }
  static vb encoded(vf y) {  // within the format
    const vu bits = as_bits(y), size = bits & 0x7fffffffu;
    const vu small = as_bits(as_floats(size) + all(ROUNDING)) - as_bits(all(ROUNDING));
    const vu rest = size - REBIASED + ((1u << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1u);
    const vu code = size < REBIASED + (1u << 23) ? small : rest >> SHIFT;
    return __builtin_convertvector(code | (bits >> 31) << 7, vb);
  }
};
using E4M3 = Float8<3, 7>;
using E5M2 = Float8<2, 15>;

struct Int8 {
  int8_t bits;
  static constexpr float LARGEST = 127.0f;
  static vf decoded(const Int8* from) {
    return __builtin_convertvector(*reinterpret_cast<const vc*>(from), vf);
  }
  static vb encoded(vf y) {
    const vf magic = all(12582912.0f);
    const vi whole = __builtin_convertvector((y + magic) - magic, vi);
    return __builtin_convertvector(reinterpret_cast<const vu&>(whole), vb);
  }
};

template <typename Code>
constexpr bool is_code = std::is_same_v<Code, E4M3> || std::is_same_v<Code, E5M2> || std::is_same_v<Code, Int8>;

template <typename Code>
inline void widen_codes(const Code* from, float* to, int64_t n, float scale) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, Code::decoded(from + i) * all(scale));
  if (i == n) return;
  Code rest[W] = {};
  float wide[W];
  std::memcpy(rest, from + i, n - i);
  store(wide, Code::decoded(rest) * all(scale));
  std::memcpy(to + i, wide, (n - i) * 4);
}

template <typename Code>
inline vb code_of(vf x, float scale) {
  vf y = x / all(scale);
  y = y == y ? y : vf{};
  y = y > all(Code::LARGEST) ? all(Code::LARGEST) : y;
  return Code::encoded(y < all(-Code::LARGEST) ? all(-Code::LARGEST) : y);
}

template <typename Code>
inline void narrow_codes(const float* from, Code* to, int64_t n, float scale) {
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const vb codes = code_of<Code>(load(from + i), scale);
    std::memcpy(to + i, &codes, W);
  }
  if (i == n) return;
  float rest[W] = {};
  std::memcpy(rest, from + i, (n - i) * 4);
  const vb codes = code_of<Code>(load(rest), scale);
  std::memcpy(to + i, &codes, n - i);
}

// The scale that takes a row's largest magnitude to the format's largest number; NaN where the row has one.
template <typename Code>
inline float scale_of(const float* row, int64_t n) {
  float largest = 0;
  bool is_nan = false;
  for (int64_t i = 0; i < n; ++i) {
    const float size = __builtin_fabsf(row[i]);
    largest = size > largest ? size : largest;
    is_nan |= row[i] != row[i];
  }
  if (is_nan) return std::numeric_limits<float>::quiet_NaN();
  return std::max(largest / Code::LARGEST, std::numeric_limits<float>::min());
}

// Scales of a tensor (no axis), of heads (one), or of tokens (the codes' axes without the last).
struct Scales {
  float* data = nullptr;
  int64_t page = 0, token = 0, head = 0;
  float& at(int64_t p, int64_t t, int64_t h) const { return data[p * page + t * token + h * head]; }
};

// `token` and `head` are the axes of the codes; head -1 where they have none, page -1 where tokens follow each other.
inline Scales scales(const std::optional<at::Tensor>& given, int page, int token, int head) {
  if (!given) return {};
  const at::Tensor& t = *given;
  Scales s{const_cast<float*>(t.const_data_ptr<float>())};
  if (t.dim() == 1) s.head = t.stride(0);
  if (t.dim() < 2) return s;
  s.page = page < 0 ? 0 : t.stride(page);
  s.token = t.stride(token);
  s.head = head < 0 ? 0 : t.stride(head);
  return s;
}

// Calls `body` with a value of the type of the codes; false where the tensor holds numbers.
template <typename Body>
inline bool with_code(at::ScalarType type, Body&& body) {
  if (type == at::kFloat8_e4m3fn) body(E4M3{});
  else if (type == at::kFloat8_e5m2) body(E5M2{});
  else if (type == at::kChar) body(Int8{});
  else return false;
  return true;
}

}  // namespace
