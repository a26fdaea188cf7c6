// Sixteen lanes: what codes.h is written in.

typedef __m512i vi;
typedef __m512 vf;

inline vi table_of(const int8_t* table) {
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}
inline vi looked_up(vi table, vi codes) { return _mm512_shuffle_epi8(table, codes); }
inline vi products(vi codes, vi digits) {
  return _mm512_madd_epi16(_mm512_maddubs_epi16(codes, digits), _mm512_set1_epi16(1));
}
#include "lanes.h"

// What the lowest four bits of a lane stand for.
class Numbers {
 public:
  explicit Numbers(const float* table) : table_(_mm512_loadu_ps(table)) {}
  __attribute__((always_inline)) inline vf get(vi codes) const { return _mm512_permutexvar_ps(codes, table_); }

 private:
  vf table_;
};

// Sixteen columns of float8 of two k through float16: of e4m3 2^-8 of the number.
template <bool IS_E4M3>
inline void two_columns(const uint8_t* from, vf* values) {
  const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  __m512i halves = _mm512_slli_epi16(wide, 8);
  if constexpr (IS_E4M3) {
    halves = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(static_cast<short>(0xBFFF)));
    const __m512i size = _mm512_and_si512(halves, _mm512_set1_epi16(0x7FFF));
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x3F80));
    halves = _mm512_mask_set1_epi16(halves, is_nan, 0x7E00);
  }
  values[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  values[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
}
