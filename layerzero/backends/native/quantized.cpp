// Products of rows with quantized weights on the CPU: codes are read as they are stored, laid out in panels once.
//
// Weights of whole numbers (int4, int8, and e2m1, which is twice a whole number) meet rows as whole numbers, too:
// an element of a row is written in three signed digits of base 256, 23 bits below the largest of its chunk, and
// sums of a chunk are exact. They are the same with every instruction that can form them: dot products of bytes in
// AVX2, AVX-VNNI, AVX-512 VNNI, tiles of AMX. Rows that are rounded to int8 have one digit. Weights of other numbers
// (nf4, float8) meet rows in float32. What the CPU has is asked once, when the module is loaded. An output element
// is one chain of operations over its row and column, so its bits are the same in every batch.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "memory.h"
#include "spread.h"

namespace {

enum Kind : int64_t { INT4, INT8, E2M1, NORMAL, E4M3, E5M2 };
enum Level : int64_t { NONE, AVX2, AVX_VNNI, AVX512, AVX512_VNNI, AMX };

constexpr int64_t ROWS = 64;  // rows of an item of work: their digits stay in the second cache

// A weight (columns, inner) in panels of 16 columns; `padded` is the inner size in whole steps of 8.
struct Weight {
  const uint8_t* codes;
  const float* scale;  // (panels / scale_every, groups, 16)
  const float* zero;   // the same, or null
  int64_t columns, padded, groups, group, chunk, chunks, scale_every;
  Kind kind;
  bool wide;             // a byte a code
  float shift;           // what a code of whole numbers is above its number, where there is no zero point
  float factor;          // of all numbers
  const int8_t* table;   // of codes of four bits, to whole numbers above zero, or null
  const float* numbers;  // what codes of four bits stand for, or null

  bool is_whole() const { return kind == INT4 || kind == INT8 || kind == E2M1; }
  int64_t panels() const { return ceil_div(columns, 16); }
  const uint8_t* codes_of(int64_t panel) const { return codes + panel * padded * (wide ? 16 : 8); }
  const float* scale_of(int64_t panel) const { return scale + at_scale(panel); }
  const float* zero_of(int64_t panel) const { return zero == nullptr ? nullptr : zero + at_scale(panel); }

 private:
  int64_t at_scale(int64_t panel) const { return scale_every == 0 ? 0 : panel / scale_every * groups * 16; }
};

// Rows as digits of base 256, lowest first: element = step * (d0 + 256 d1 + 65536 d2).
struct Digits {
  int64_t count, stride, chunks;
  std::vector<int8_t> digits;  // (rows, count, stride)
  std::vector<float> sums;     // (rows, count, chunks)
  std::vector<float> steps;    // (rows, chunks)

  const int8_t* at(int64_t row, int64_t digit) const { return digits.data() + (row * count + digit) * stride; }
  int8_t* at(int64_t row, int64_t digit) { return digits.data() + (row * count + digit) * stride; }
  float sum(int64_t row, int64_t digit, int64_t chunk) const { return sums[(row * count + digit) * chunks + chunk]; }
  float step(int64_t row, int64_t chunk) const { return steps[row * chunks + chunk]; }
};

struct Floats {
  int64_t stride;
  std::vector<float> data;
  const float* at(int64_t row) const { return data.data() + row * stride; }
};

// Twice the magnitude of e2m1, and 12 above it.
alignas(16) constexpr int8_t E2M1_TABLE[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
alignas(64) constexpr float NF4_TABLE[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
constexpr int LANES = 8, HEIGHT = 2, REAL_HEIGHT = 4;
#include "codes_256.h"
template <bool WIDE>
inline vi dot(vi sum, vi codes, vi digits) { return dot_by_pairs<WIDE>(sum, codes, digits); }
#include "codes.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avxvnni")
namespace avx_vnni {
constexpr int LANES = 8, HEIGHT = 3, REAL_HEIGHT = 4;
#include "codes_256.h"
template <bool>
inline vi dot(vi sum, vi codes, vi digits) { return _mm256_dpbusd_avx_epi32(sum, codes, digits); }
#include "codes.h"
}  // namespace avx_vnni
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512 {
constexpr int LANES = 16, HEIGHT = 4, REAL_HEIGHT = 8;
#include "codes_512.h"
template <bool WIDE>
inline vi dot(vi sum, vi codes, vi digits) { return dot_by_pairs<WIDE>(sum, codes, digits); }
#include "codes.h"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
namespace avx512_vnni {
constexpr int LANES = 16, HEIGHT = 4, REAL_HEIGHT = 8;
#include "codes_512.h"
template <bool>
inline vi dot(vi sum, vi codes, vi digits) { return _mm512_dpbusd_epi32(sum, codes, digits); }
#include "codes.h"
}  // namespace avx512_vnni
#pragma GCC pop_options

#include "tiles.h"

Level detected() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return NONE;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (wide && __builtin_cpu_supports("avx512vnni")) return amx::allowed() ? AMX : AVX512_VNNI;
  if (wide) return AVX512;
  return amx::has_avx_vnni() ? AVX_VNNI : AVX2;
}

void whole_panel(Level level, const Weight& w, const Digits& x, int64_t panel, int64_t row, int64_t rows, float* out) {
  switch (level) {
    case AVX2:
      return avx2::whole_panel(w, x, panel, row, rows, out);
    case AVX_VNNI:
      return avx_vnni::whole_panel(w, x, panel, row, rows, out);
    case AVX512:
      return avx512::whole_panel(w, x, panel, row, rows, out);
    default:
      return avx512_vnni::whole_panel(w, x, panel, row, rows, out);
  }
}

void real_panel(Level level, const Weight& w, const Floats& x, int64_t panel, int64_t row, int64_t rows, float* out) {
  if (level >= AVX512) return avx512::real_panel(w, x, panel, row, rows, out);
  return avx2::real_panel(w, x, panel, row, rows, out);
}

#else

namespace amx {
inline bool fits(const Weight&) { return false; }
inline void panel(const Weight&, const Digits&, int64_t, int64_t, int64_t, float*) {}
struct Session {};
}  // namespace amx
Level detected() { return NONE; }
void whole_panel(Level, const Weight&, const Digits&, int64_t, int64_t, int64_t, float*) {}
void real_panel(Level, const Weight&, const Floats&, int64_t, int64_t, int64_t, float*) {}

#endif

Level& level() {
  static Level found = detected();
  return found;
}

// What the CPU has, or less: the highest level that is used from now on; the one in use comes back.
int64_t use_level(int64_t most) {
  level() = static_cast<Level>(std::min<int64_t>(most, detected()));
  return level();
}

// Where the byte of a column and k stands in a panel of codes of eight bits: float8 column after column.
int64_t place_of(int64_t column, int64_t k, bool is_signed) {
  return is_signed ? k / 4 * 64 + column * 4 + k % 4 : k * 16 + column;
}

// Weights (..., columns, bytes) in panels: (..., panels, padded * 16 or 8 bytes). A code of int8, the only signed
// kind, is stored 128 higher.
at::Tensor pack(const at::Tensor& weight_in, bool wide, bool is_signed) {
  const pybind11::gil_scoped_release released;
  const at::Tensor weight = weight_in.contiguous();
  const int64_t columns = weight.size(-2), bytes = weight.size(-1), inner = wide ? bytes : bytes * 2;
  const int64_t padded = ceil_div(inner, 8) * 8, panels = ceil_div(columns, 16), size = padded * (wide ? 16 : 8);
  const int64_t matrices = columns * bytes == 0 ? 0 : weight.numel() / (columns * bytes);
  at::Tensor out = at::empty({matrices, panels, size}, at::kByte);
  const auto* from = static_cast<const uint8_t*>(weight.const_data_ptr());
  auto* to = out.data_ptr<uint8_t>();
  const uint8_t flip = is_signed ? 128 : 0;
  spread(matrices * panels, [&](int64_t item) {
    const int64_t matrix = item / panels, first = item % panels * 16;
    uint8_t* target = to + item * size;
    std::fill_n(target, size, flip);
    for (int64_t column = 0; column < std::min<int64_t>(16, columns - first); ++column) {
      const uint8_t* row = from + (matrix * columns + first + column) * bytes;
      for (int64_t k = 0; k < inner; ++k) {
        if (wide) {
          target[place_of(column, k, is_signed)] = row[k] ^ flip;
        } else {
          const uint8_t code = (row[k / 2] >> (k % 2 * 4)) & 15;
          target[k / 8 * 64 + column * 4 + k % 4] |= code << (k % 8 / 4 * 4);
        }
      }
    }
  });
  return out;
}

// Whether one byte of every panel is still what it was when the weight (columns, bytes) was laid out.
bool unchanged(const uint8_t* panels, int64_t padded, const at::Tensor& weight, bool wide, uint8_t flip) {
  const int64_t columns = weight.size(0), bytes = weight.size(1), down = weight.stride(0), along = weight.stride(1);
  const auto* from = static_cast<const uint8_t*>(weight.const_data_ptr());
  bool same = true;
  for (int64_t panel = 0, place = 0; panel * 16 < columns; ++panel, place = (place + 37) % bytes) {
    const int64_t column = std::min<int64_t>(panel % 16, columns - 1 - panel * 16);
    const uint8_t now = from[(panel * 16 + column) * down + place * along];
    const uint8_t* start = panels + panel * padded * (wide ? 16 : 8);
    if (wide) {
      same &= start[place_of(column, place, flip != 0)] == (now ^ flip);
    } else {
      const uint8_t* kept = start + column * 4;
      const int64_t k = place * 2, shift = k % 8 / 4 * 4;
      const auto low = (kept[k / 8 * 64 + k % 4] >> shift) & 15, high = (kept[k / 8 * 64 + k % 4 + 1] >> shift) & 15;
      same &= (low | high << 4) == now;
    }
  }
  return same;
}

// A row that has no digits: infinity or NaN, or a chunk so small that its step would be subnormal.
bool is_odd(const float* row, const Weight& w, int64_t inner) {
  for (int64_t begin = 0; begin < inner; begin += w.chunk) {
    float largest = 0;
    bool finite = true;
    for (int64_t k = begin; k < std::min(inner, begin + w.chunk); ++k) {
      finite &= std::isfinite(row[k]);
      largest = std::max(largest, std::abs(row[k]));
    }
    if (!finite || (largest != 0 && largest < 0x1p-96f)) return true;
  }
  return false;
}

// Rounds to the nearest, halves to even, without the state of the processor.
inline int32_t nearest(float x) { return static_cast<int32_t>(std::nearbyint(x)); }

void three_digits(const float* row, const Weight& w, int64_t inner, Digits& x, int64_t at) {
  int8_t *low = x.at(at, 0), *middle = x.at(at, 1), *high = x.at(at, 2);
  for (int64_t chunk = 0; chunk < w.chunks; ++chunk) {
    const int64_t begin = chunk * w.chunk, end = std::min(inner, begin + w.chunk);
    float largest = 0;
    for (int64_t k = begin; k < end; ++k) largest = std::max(largest, std::abs(row[k]));
    int exponent = 0;
    if (largest != 0) std::frexp(largest, &exponent);
    const float inverse = std::ldexp(1.0f, 22 - exponent), step = std::ldexp(1.0f, exponent - 22);
    int32_t sums[3] = {};
    for (int64_t k = begin; k < end; ++k) {
      const int32_t value = nearest(row[k] * inverse);
      low[k] = static_cast<int8_t>(value);
      const int32_t above = (value - low[k]) >> 8;
      middle[k] = static_cast<int8_t>(above);
      high[k] = static_cast<int8_t>((above - middle[k]) >> 8);
      sums[0] += low[k], sums[1] += middle[k], sums[2] += high[k];
    }
    for (int d = 0; d < 3; ++d) x.sums[(at * 3 + d) * x.chunks + chunk] = static_cast<float>(sums[d]);
    x.steps[at * x.chunks + chunk] = step;
  }
}

// As `quantize` rounds a row to int8 with one scale.
void one_digit(const float* row, const Weight& w, int64_t inner, Digits& x, int64_t at) {
  float largest = 0;
  for (int64_t k = 0; k < inner; ++k) largest = std::max(largest, std::abs(row[k]));
  const float scale = std::max(largest / 127.0f, 0x1p-126f);
  int8_t* digits = x.at(at, 0);
  for (int64_t chunk = 0; chunk < w.chunks; ++chunk) {
    int32_t sum = 0;
    for (int64_t k = chunk * w.chunk; k < std::min(inner, (chunk + 1) * w.chunk); ++k) {
      digits[k] = static_cast<int8_t>(std::clamp(nearest(row[k] / scale), -127, 127));
      sum += digits[k];
    }
    x.sums[at * x.chunks + chunk] = static_cast<float>(sum);
    x.steps[at * x.chunks + chunk] = scale;
  }
}

float number_of(const Weight& w, int64_t column, int64_t k) {
  const uint8_t* panel = w.codes_of(column / 16) + column % 16 * 4;
  const int64_t group = (w.groups == 1 ? 0 : k / w.group) * 16 + column % 16;
  const float scale = w.scale_of(column / 16)[group];
  const uint8_t code =
      w.wide ? panel[k / 4 * 64 + k % 4] : (panel[k / 8 * 64 + k % 4] >> (k % 8 / 4 * 4)) & 15;
  const float* zero = w.zero_of(column / 16);
  return ((w.table != nullptr ? w.table[code] : code) - (zero != nullptr ? zero[group] : w.shift)) * scale;
}

// A row in float32, one product after the other: for the few that have no digits.
void odd_row(const Weight& w, const float* row, int64_t inner, float* out) {
  spread(w.columns, [&](int64_t column) {
    float sum = 0;
    for (int64_t k = 0; k < inner; ++k) sum += row[k] * number_of(w, column, k);
    out[column] = sum * w.factor;
  });
}

Digits digits_of(const float* x, int64_t rows, int64_t inner, const Weight& w, bool rounded) {
  // Tiles read whole chunks of whole blocks of rows.
  Digits out{rounded ? 1 : 3, ceil_div(w.chunks * w.chunk, 64) * 64, w.chunks, {}, {}, {}};
  const int64_t room = ceil_div(rows, 16) * 16;
  out.digits.resize(room * out.count * out.stride);
  out.sums.resize(rows * out.count * out.chunks);
  out.steps.resize(rows * out.chunks);
  spread(rows, [&](int64_t row) {
    const float* from = x + row * inner;
    if (rounded) one_digit(from, w, inner, out, row);
    else if (!is_odd(from, w, inner)) three_digits(from, w, inner, out, row);
  });
  return out;
}

// All rows times all panels: out (rows, columns) float32.
void product(const Weight& w, const float* x, int64_t rows, int64_t inner, bool rounded, const float* bias, float* out) {
  const Level now = level();
  const int64_t threads = at::get_num_threads(), panels = w.panels();
  const int64_t blocks = ceil_div(rows, ROWS);
  const int64_t wide = std::max<int64_t>(1, ceil_div(panels, ceil_div(4 * threads, blocks)));
  const int64_t cuts = ceil_div(panels, wide);
  Digits digits;
  Floats floats{ceil_div(inner, 8) * 8, {}};
  if (w.is_whole()) {
    digits = digits_of(x, rows, inner, w, rounded);
  } else {
    floats.data.resize(rows * floats.stride);
    for (int64_t row = 0; row < rows; ++row) std::copy_n(x + row * inner, inner, floats.data.data() + row * floats.stride);
  }
  const bool tiled = now == AMX && rows > 3 && w.is_whole() && amx::fits(w);
  spread(blocks * cuts, [&](int64_t item) {
    const int64_t row = item / cuts * ROWS, many = std::min(ROWS, rows - row), begin = item % cuts * wide;
    std::array<float, ROWS * 16> part;
    std::optional<amx::Session> session;
    if (tiled) session.emplace();
    for (int64_t panel = begin; panel < std::min(panels, begin + wide); ++panel) {
      if (tiled) amx::panel(w, digits, panel, row, many, part.data());
      else if (w.is_whole()) whole_panel(now, w, digits, panel, row, many, part.data());
      else real_panel(now, w, floats, panel, row, many, part.data());
      const int64_t column = panel * 16, columns = std::min<int64_t>(16, w.columns - column);
      for (int64_t r = 0; r < many; ++r)
        for (int64_t c = 0; c < columns; ++c) out[(row + r) * w.columns + column + c] = part[r * 16 + c] * w.factor;
    }
  });
  if (w.is_whole() && !rounded)
    for (int64_t row = 0; row < rows; ++row)
      if (is_odd(x + row * inner, w, inner)) odd_row(w, x + row * inner, inner, out + row * w.columns);
  if (rounded)  // one infinity or NaN makes the scale of its row so
    for (int64_t row = 0; row < rows; ++row)
      if (!std::all_of(x + row * inner, x + (row + 1) * inner, [](float each) { return std::isfinite(each); }))
        std::fill_n(out + row * w.columns, w.columns, std::nanf(""));
  if (bias != nullptr)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t c = 0; c < w.columns; ++c) out[row * w.columns + c] += bias[c];
}

// The largest part of a group, of whole steps of 8, that is added up before it is scaled.
int64_t chunk_of(int64_t group, int64_t padded, bool grouped) {
  if (!grouped) return std::min<int64_t>(padded, 128);
  for (int64_t size = std::min<int64_t>(128, group) / 8 * 8; size > 8; size -= 8)
    if (group % size == 0) return size;
  return 8;
}

// (rows, columns) float32 = x (rows, inner) weight^T + bias. `group` numbers of a row share a scale; scales are
// (panels / scale_every, groups, 16), of which every panel has the first where scale_every is 0.
at::Tensor linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale,
                  const std::optional<at::Tensor>& zero, const std::optional<at::Tensor>& bias, int64_t columns,
                  int64_t kind, int64_t group, int64_t scale_every, double factor, bool rounded) {
  const pybind11::gil_scoped_release released;
  const int64_t rows = x.size(0), inner = x.size(1), padded = ceil_div(inner, 8) * 8;
  const int64_t groups = scale.size(-2);
  Weight w{};
  w.codes = codes.const_data_ptr<uint8_t>(), w.scale = scale.const_data_ptr<float>();
  w.zero = zero ? zero->const_data_ptr<float>() : nullptr;
  w.columns = columns, w.padded = padded, w.groups = groups, w.scale_every = scale_every;
  w.kind = static_cast<Kind>(kind);
  w.wide = kind == INT8 || kind == E4M3 || kind == E5M2;
  w.shift = kind == INT8 ? 128.0f : kind == E2M1 ? 12.0f : 8.0f;
  w.factor = static_cast<float>(kind == E2M1 ? factor / 2 : kind == E4M3 ? factor * 256 : factor);
  w.table = kind == E2M1 ? E2M1_TABLE : nullptr;
  w.numbers = NF4_TABLE;
  w.chunk = chunk_of(group, padded, groups > 1);
  w.chunks = ceil_div(padded, w.chunk);
  w.group = groups > 1 ? group : w.chunk * w.chunks;
  TORCH_CHECK(codes.numel() == w.panels() * padded * (w.wide ? 16 : 8), "panels of another weight");
  TORCH_CHECK(groups == 1 || group % 8 == 0, "groups of whole steps of 8 are needed");
  TORCH_CHECK(groups == 1 || ceil_div(inner, group) == groups, "scales of another weight");
  at::Tensor out = at::empty({rows, columns}, at::kFloat);
  const at::Tensor from = x.to(at::kFloat).resolve_neg().contiguous();
  const at::Tensor added = bias ? bias->to(at::kFloat).resolve_neg().contiguous() : at::Tensor();
  if (rows > 0 && columns > 0)
    product(w, from.const_data_ptr<float>(), rows, inner, rounded, bias ? added.const_data_ptr<float>() : nullptr,
            out.data_ptr<float>());
  return out;
}

// The gated hidden rows (rows, F) of products (rows, 2 F), element by element: no vector's end decides a bit.
at::Tensor gated(const at::Tensor& up, int64_t activation, bool second) {
  const pybind11::gil_scoped_release released;
  const int64_t rows = up.size(0), hidden = up.size(1) / 2;
  at::Tensor out = at::empty({rows, hidden}, at::kFloat);
  const float* from = up.const_data_ptr<float>();
  float* to = out.data_ptr<float>();
  spread(rows, [&](int64_t row) {
    const float *gate = from + row * 2 * hidden + (second ? hidden : 0), *other = from + row * 2 * hidden + (second ? 0 : hidden);
    for (int64_t k = 0; k < hidden; ++k) {
      const float x = gate[k];
      float open = std::max(x, 0.0f);
      if (activation == 0) open = x / (1.0f + std::exp(-x));
      else if (activation == 1) open = x * 0.5f * (1.0f + std::erf(x * 0.70710678f));
      else if (activation == 2) open = x * 0.5f * (1.0f + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
      else if (x != x) open = x;
      to[row * hidden + k] = open * other[k];
    }
  });
  return out;
}

bool same(const at::Tensor& panels, const at::Tensor& weight, bool wide, bool is_signed) {
  const int64_t inner = wide ? weight.size(1) : weight.size(1) * 2;
  return unchanged(panels.const_data_ptr<uint8_t>(), ceil_div(inner, 8) * 8, weight, wide, is_signed ? 128 : 0);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("pack", reading(&pack));
  m.def("same", reading(&same));
  m.def("linear", reading(&linear));
  m.def("gated", reading(&gated));
  m.def("use_level", &use_level);
}
