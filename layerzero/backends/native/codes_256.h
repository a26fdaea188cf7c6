// Eight lanes: what codes.h is written in.

typedef __m256i vi;
typedef __m256 vf;

inline vi table_of(const int8_t* table) {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}
inline vi looked_up(vi table, vi codes) { return _mm256_shuffle_epi8(table, codes); }
inline vi products(vi codes, vi digits) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, digits), _mm256_set1_epi16(1));
}
#include "lanes.h"

// What the lowest four bits of a lane stand for.
class Numbers {
 public:
  explicit Numbers(const float* table) : low_(_mm256_loadu_ps(table)), high_(_mm256_loadu_ps(table + 8)) {}
  __attribute__((always_inline)) inline vf get(vi codes) const {
    const vf low = _mm256_permutevar8x32_ps(low_, codes), high = _mm256_permutevar8x32_ps(high_, codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
  }

 private:
  vf low_, high_;
};

// Eight columns of float8 of two k, 16 bytes apart, through float16: of e4m3 2^-8 of the number.
template <bool IS_E4M3>
inline void two_columns(const uint8_t* from, vf* values) {
  for (int j = 0; j < 2; ++j) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + j * 16));
    __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 8);
    if constexpr (IS_E4M3) {
      halves = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7), _mm_set1_epi16(static_cast<short>(0xBFFF)));
      const __m128i size = _mm_and_si128(halves, _mm_set1_epi16(0x7FFF));
      const __m128i is_nan = _mm_cmpeq_epi16(size, _mm_set1_epi16(0x3F80));
      halves = _mm_or_si128(halves, _mm_and_si128(is_nan, _mm_set1_epi16(0x7E00)));
    }
    values[j] = _mm256_cvtph_ps(halves);
  }
}
