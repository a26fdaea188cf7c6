// Whole numbers in tiles of AMX: 16 rows of digits times 16 columns of a panel in one instruction.

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,amx-tile,amx-int8")
namespace amx {

inline bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 4)) != 0;
}

// Whether the CPU has tiles, and the kernel lets this process use them.
inline bool allowed() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & (3u << 24)) != (3u << 24)) return false;
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

constexpr int64_t DEPTH = 64;  // bytes of a row of digits in a tile

// Whether chunks are whole tiles; sums of smaller ones are scaled so often that vectors are faster.
inline bool fits(const Weight& w) { return w.chunk % DEPTH == 0; }

// What was stored is in memory: gcc's instructions of tiles do not say that they read it.
inline void settled() { asm volatile("" ::: "memory"); }

// The shapes of tiles while it lives: three of sums, one of digits, one of codes.
class Session {
 public:
  Session() {
    struct alignas(64) Config {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 5; ++tile) config.bytes[tile] = 64, config.rows[tile] = 16;
    settled();
    _tile_loadconfig(&config);
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() { _tile_release(); }
};

// Codes of a chunk as bytes: 64 of four k after the other.
inline const uint8_t* unpacked(const Weight& w, const uint8_t* from, int64_t length, uint8_t* room) {
  if (w.wide && length == w.chunk) return from;
  if (w.wide) {
    std::memset(room + length * 16, 0, (w.chunk - length) * 16);
    return static_cast<const uint8_t*>(std::memcpy(room, from, length * 16));
  }
  const __m512i half = _mm512_set1_epi8(15);
  const __m512i table = w.table == nullptr
      ? __m512i{} : _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(w.table)));
  for (int64_t k = 0; k < length; k += 8) {
    const __m512i both = _mm512_loadu_si512(from + k * 8);
    __m512i low = _mm512_and_si512(both, half), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
    if (w.table != nullptr) low = _mm512_shuffle_epi8(table, low), high = _mm512_shuffle_epi8(table, high);
    _mm512_store_si512(room + k * 16, low);
    _mm512_store_si512(room + k * 16 + 64, high);
  }
  if (length < w.chunk) std::memset(room + length * 16, 0, (w.chunk - length) * 16);
  return room;
}

template <int D>
inline void multiply(const Digits& x, int64_t row, int64_t begin, int64_t chunk, const uint8_t* codes,
                     int32_t* sums) {
  const int64_t stride = x.count * x.stride;
  settled();
  _tile_zero(0);
  if constexpr (D > 1) {
    _tile_zero(1);
    _tile_zero(2);
  }
  for (int64_t k = 0; k < chunk; k += DEPTH) {
    _tile_loadd(4, codes + k * 16, 64);
    _tile_loadd(3, x.at(row, 0) + begin + k, stride);
    _tile_dpbsud(0, 3, 4);
    if constexpr (D > 1) {
      _tile_loadd(3, x.at(row, 1) + begin + k, stride);
      _tile_dpbsud(1, 3, 4);
      _tile_loadd(3, x.at(row, 2) + begin + k, stride);
      _tile_dpbsud(2, 3, 4);
    }
  }
  _tile_stored(0, sums, 64);
  if constexpr (D > 1) {
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
  }
}

template <int D>
inline void panel_of(const Weight& w, const Digits& x, int64_t panel, int64_t row, int64_t rows, float* out) {
  alignas(64) uint8_t room[128 * 16];
  alignas(64) int32_t sums[3 * 256];
  const int64_t per_group = w.group / w.chunk;
  const float *scale = w.scale_of(panel), *zero = w.zero_of(panel);
  const uint8_t* from = w.codes_of(panel);
  std::fill_n(out, rows * 16, 0.0f);
  for (int64_t chunk = 0; chunk < w.chunks; ++chunk) {
    const int64_t begin = chunk * w.chunk, length = std::min(w.chunk, w.padded - begin);
    const uint8_t* codes = unpacked(w, from, length, room);
    from += length * (w.wide ? 16 : 8);
    const int64_t group = chunk / per_group * 16;
    const __m512 spread = _mm512_loadu_ps(scale + group);
    const __m512 shift = zero != nullptr ? _mm512_loadu_ps(zero + group) : _mm512_set1_ps(w.shift);
    for (int64_t block = 0; block < rows; block += 16) {
      multiply<D>(x, row + block, begin, w.chunk, codes, sums);
      for (int64_t r = 0; r < std::min<int64_t>(16, rows - block); ++r) {
        const int64_t at = row + block + r;
        __m512 value = __m512{};
        for (int d = D - 1; d >= 0; --d) {
          const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums + d * 256 + r * 16));
          value = value * 256.0f + (sum - shift * x.sum(at, d, chunk));
        }
        float* to = out + (block + r) * 16;
        _mm512_storeu_ps(to, _mm512_loadu_ps(to) + value * (spread * x.step(at, chunk)));
      }
    }
  }
}

void panel(const Weight& w, const Digits& x, int64_t at, int64_t row, int64_t rows, float* out) {
  x.count == 1 ? panel_of<1>(w, x, at, row, rows, out) : panel_of<3>(w, x, at, row, rows, out);
}

}  // namespace amx
#pragma GCC pop_options
