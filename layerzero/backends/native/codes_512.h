// Sixteen lanes: what codes.h is written in.

typedef __m512i vi;
typedef __m512 vf;

inline vi load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline vi low_half(vi codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(15)); }
inline vi high_half(vi codes) { return low_half(_mm512_srli_epi16(codes, 4)); }
inline vi table_of(const int8_t* table) {
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}
inline vi looked_up(vi table, vi codes) { return _mm512_shuffle_epi8(table, codes); }
inline vi every(int32_t value) { return _mm512_set1_epi32(value); }
inline vi shifted(vi codes, int by) { return _mm512_srli_epi32(codes, by); }
inline vf to_float(vi sums) { return _mm512_cvtepi32_ps(sums); }
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf v) { _mm512_storeu_ps(p, v); }
inline vf all(float x) { return _mm512_set1_ps(x); }

// What the lowest bits of a lane stand for.
class Numbers {
 public:
  explicit Numbers(const float* table) : table_(_mm512_loadu_ps(table)) {}
  template <int KIND>
  __attribute__((always_inline)) inline vf get(vi codes) const {
    if constexpr (KIND == NORMAL) return _mm512_permutexvar_ps(codes, table_);
    constexpr int MANTISSA = KIND == E4M3 ? 3 : 2, BIAS = KIND == E4M3 ? 7 : 15;
    const vi size = _mm512_and_si512(codes, _mm512_set1_epi32(127));
    const vi moved = _mm512_slli_epi32(size, 23 - MANTISSA);
    const vf usual = _mm512_castsi512_ps(_mm512_add_epi32(moved, _mm512_set1_epi32((127 - BIAS) << 23)));
    // Below the smallest exponent a code is a whole number of the smallest step.
    const __mmask16 is_small = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(1 << MANTISSA));
    const vf step = all(1.0f / (1 << (BIAS + MANTISSA - 1)));
    const vf value = _mm512_mask_mul_ps(usual, is_small, _mm512_cvtepi32_ps(size), step);
    const vi sign = _mm512_slli_epi32(_mm512_and_si512(codes, _mm512_set1_epi32(128)), 24);
    return _mm512_or_ps(value, _mm512_castsi512_ps(sign));
  }

 private:
  vf table_;
};
