// Eight lanes: what codes.h is written in.

typedef __m256i vi;
typedef __m256 vf;

inline vi load_codes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline vi low_half(vi codes) { return _mm256_and_si256(codes, _mm256_set1_epi8(15)); }
inline vi high_half(vi codes) { return low_half(_mm256_srli_epi16(codes, 4)); }
inline vi table_of(const int8_t* table) {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}
inline vi looked_up(vi table, vi codes) { return _mm256_shuffle_epi8(table, codes); }
inline vi every(int32_t value) { return _mm256_set1_epi32(value); }
inline vi shifted(vi codes, int by) { return _mm256_srli_epi32(codes, by); }
inline vf to_float(vi sums) { return _mm256_cvtepi32_ps(sums); }
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vf v) { _mm256_storeu_ps(p, v); }
inline vf all(float x) { return _mm256_set1_ps(x); }

// What the lowest bits of a lane stand for.
class Numbers {
 public:
  explicit Numbers(const float* table) : low_(_mm256_loadu_ps(table)), high_(_mm256_loadu_ps(table + 8)) {}
  template <int KIND>
  __attribute__((always_inline)) inline vf get(vi codes) const {
    if constexpr (KIND == NORMAL) {
      const vf low = _mm256_permutevar8x32_ps(low_, codes), high = _mm256_permutevar8x32_ps(high_, codes);
      return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
    }
    constexpr int MANTISSA = KIND == E4M3 ? 3 : 2, BIAS = KIND == E4M3 ? 7 : 15;
    const vi size = _mm256_and_si256(codes, _mm256_set1_epi32(127));
    const vi moved = _mm256_slli_epi32(size, 23 - MANTISSA);
    const vi usual = _mm256_add_epi32(moved, _mm256_set1_epi32((127 - BIAS) << 23));
    // Below the smallest exponent a code is a whole number of the smallest step.
    const vf small = _mm256_mul_ps(_mm256_cvtepi32_ps(size), all(1.0f / (1 << (BIAS + MANTISSA - 1))));
    const vi is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(1 << MANTISSA), size);
    const vf value = _mm256_blendv_ps(_mm256_castsi256_ps(usual), small, _mm256_castsi256_ps(is_small));
    const vi sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(128)), 24);
    return _mm256_or_ps(value, _mm256_castsi256_ps(sign));
  }

 private:
  vf low_, high_;
};
