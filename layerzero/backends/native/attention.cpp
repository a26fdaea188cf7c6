// Attention over keys and values in pages, or behind each other, on the CPU.
//
// One item of work is a block of queries of one sequence for some key heads. It walks over the keys in tiles
// of fixed places, keeps a running maximum and sum for each row (online softmax) and reads each key and value
// once for all query heads of its group. A row's arithmetic depends on nothing but its own sequence, so its
// bits are the same in every batch and for any number of threads.

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "append.h"
#include "eight_bits.h"
#include "memory.h"
#include "spread.h"
#include "vectors.h"

namespace {

#if defined(__AVX512F__)
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif

constexpr int TILE = 32;      // keys a tile
constexpr int FEW = 4;        // query rows from which on a tile of keys is worth turning around
constexpr int ROWS = 32;      // query rows of one key head an item
constexpr int ITEM_ROWS = 128;  // query rows an item, over its key heads

constexpr float INF = std::numeric_limits<float>::infinity();

inline vf fold(vf a, vf b) {
  return __builtin_shufflevector(a, b, LOW) + __builtin_shufflevector(a, b, HIGH);
}

// Lane i of the result is the sum of acc[i]'s lanes.
inline vf sums(vf* acc) {
#pragma GCC unroll 4
  for (int n = W / 2; n >= 1; n /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) acc[i] = fold(acc[i], acc[i + n]);
  return acc[0];
}

template <int... I>
constexpr vi numbers(std::integer_sequence<int, I...>) { return vi{I...}; }
inline vi lanes() { return numbers(std::make_integer_sequence<int, W>{}); }

// Lane i of the result is lane i ^ N.
template <int N>
inline vf swapped(vf x) { return __builtin_shuffle(x, lanes() ^ N); }

// All lanes of the result are the largest lane, or the sum of the lanes.
template <int N = W / 2>
inline vf largest(vf x) {
  const vf y = swapped<N>(x), z = x > y ? x : y;
  if constexpr (N == 1) return z;
  else return largest<N / 2>(z);
}
template <int N = W / 2>
inline vf summed(vf x) {
  const vf z = x + swapped<N>(x);
  if constexpr (N == 1) return z;
  else return summed<N / 2>(z);
}

// W rows of W values become columns: after log2(W) perfect shuffles every value is in its place.
inline void transpose(vf* rows) {
#pragma GCC unroll 4
  for (int n = W; n > 1; n /= 2) {
    vf next[W];
#pragma GCC unroll 8
    for (int i = 0; i < W / 2; ++i) {
      next[2 * i] = __builtin_shufflevector(rows[i], rows[i + W / 2], LOW);
      next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + W / 2], HIGH);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) rows[i] = next[i];
  }
}

inline vf capped(vf s, float cap) {
  const vf x = s / all(cap);
  const vf size = x < vf{} ? -x : x;
  const vf t = exponential(all(-2.0f) * size);
  const vf y = (all(1.0f) - t) / (all(1.0f) + t);
  return all(cap) * (x < vf{} ? -y : y);
}

void narrow_any(const float* from, void* to, at::ScalarType type, int64_t n) {
  if (type == at::kFloat) {
    std::memcpy(to, from, n * 4);
  } else if (type == at::kBFloat16) {
    auto* out = static_cast<uint16_t*>(to);
    for (int64_t i = 0; i < n; ++i) {
      uint32_t bits;
      std::memcpy(&bits, from + i, 4);
      const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
      out[i] = from[i] == from[i] ? uint16_t(rounded) : uint16_t(0x7fc0);
    }
  } else {
    auto* out = static_cast<_Float16*>(to);
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<_Float16>(from[i]);
  }
}

struct Pool {  // rows of `width` elements; strides in elements, the last axis is dense
  const void* data = nullptr;
  int64_t page = 0, token = 0, head = 0, width = 0, padded = 0;
  Scales scales{};
};

struct Indices {  // int32 or int64, read as int64
  const void* data = nullptr;
  bool wide = false;
  int64_t row = 0, step = 1;
  int64_t at(int64_t r, int64_t c) const {
    const int64_t i = r * row + c * step;
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct Call {
  int64_t batch, tokens, key_heads, group, page_size, pages, table_width;
  Pool q[2], k[2], v;  // a second part of q and k where keys lie in two pools
  at::ScalarType q_type;
  bool tables, latent;  // latent: values are the first part of the keys
  Indices table, lens, cu, cu_k;
  bool has_cu;
  int64_t left, right;  // -1: unbounded
  float scale, softcap;
  char* out;
  float* lse;
  int64_t key_width, value_width;  // padded to whole vectors

  int64_t first(int64_t b) const { return has_cu ? cu.at(0, b) : b; }
  int64_t length(int64_t b) const { return tables ? lens.at(0, b) : cu_k.at(0, b + 1) - cu_k.at(0, b); }
};

struct Item { int64_t sequence, token, tokens, head, heads, lane, lanes; };

struct Scratch {  // one a thread; grows, never shrinks
  std::vector<float> store;
  float *q, *out, *peak, *total, *score, *keys, *values, *turned;
  void fit(int64_t rows, int64_t key_width, int64_t value_width) {
    const int64_t need = rows * (key_width + value_width + 2 * W) + ROWS * 4 * TILE + TILE * (2 * key_width + value_width);
    if (int64_t(store.size()) < need + 64) store.resize(need + 64);
    auto base = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(store.data()) + 63) & ~uintptr_t(63));
    const int64_t vectors = (rows + W - 1) / W * W;
    keys = base;
    values = keys + TILE * key_width;
    turned = values + TILE * value_width;
    q = turned + TILE * key_width;
    out = q + rows * key_width;
    score = out + rows * value_width;
    peak = score + std::max<int64_t>(ROWS, 1) * TILE;
    total = peak + vectors;
  }
};

// scores[r][0, TILE) for all rows, W keys at a time.
void multiply_keys(const float* q, int64_t rows, const float* const* keys, int64_t width, int count, float* scores) {
  for (int at = 0; at < count; at += W) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = q + r * width;
      vf acc[W] = {};
      for (int64_t d = 0; d < width; d += W) {
        const vf x = load(row + d);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) acc[i] += x * load(keys[at + i] + d);
      }
      store(scores + r * TILE + at, sums(acc));
    }
  }
}

// The keys of a tile turned around: at[d][0, TILE).
void turn_keys(const float* const* keys, int64_t width, int count, float* at) {
  for (int first = 0; first < count; first += W)
    for (int64_t d = 0; d < width; d += W) {
      vf block[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) block[i] = load(keys[first + i] + d);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) store(at + (d + i) * TILE + first, block[i]);
    }
}

template <int R, int C>
inline void multiply_turned_block(const float* q, const float* keys, int64_t width, float* scores) {
  vf acc[R][C] = {};
  for (int64_t d = 0; d < width; ++d) {
    vf key[C];
    for (int c = 0; c < C; ++c) key[c] = load(keys + d * TILE + c * W);
    for (int r = 0; r < R; ++r) {
      const vf x = all(q[r * width + d]);
      for (int c = 0; c < C; ++c) acc[r][c] += x * key[c];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(scores + r * TILE + c * W, acc[r][c]);
}

// The same scores from keys that were turned around: sums run along the head, one lane a key.
void multiply_turned(const float* q, int64_t rows, const float* keys, int64_t width, int count, float* scores) {
  for (int at = 0; at < count; at += 2 * W) {
    const bool pair = count - at > W;
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      if (pair) multiply_turned_block<4, 2>(q + r * width, keys + at, width, scores + r * TILE + at);
      else multiply_turned_block<4, 1>(q + r * width, keys + at, width, scores + r * TILE + at);
    }
    for (; r < rows; ++r) {
      if (pair) multiply_turned_block<1, 2>(q + r * width, keys + at, width, scores + r * TILE + at);
      else multiply_turned_block<1, 1>(q + r * width, keys + at, width, scores + r * TILE + at);
    }
  }
}

template <int R, int C>
inline void add_values_block(const float* p, const float* const* values, int count, int64_t width, float* out) {
  vf acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = load(out + r * width + c * W);
  for (int j = 0; j < count; ++j) {
    const float* value = values[j];
    for (int r = 0; r < R; ++r) {
      const vf weight = all(p[r * TILE + j]);
      for (int c = 0; c < C; ++c) acc[r][c] += weight * load(value + c * W);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(out + r * width + c * W, acc[r][c]);
}

template <int R>
inline void add_values_rows(const float* p, const float* const* values, int count, int64_t width, float* out) {
  const float* shifted[TILE];
  for (int j = 0; j < count; ++j) shifted[j] = values[j];
  int64_t d = 0;
  for (; d + 4 * W <= width; d += 4 * W) {
    add_values_block<R, 4>(p, shifted, count, width, out + d);
    for (int j = 0; j < count; ++j) shifted[j] += 4 * W;
  }
  for (; d + 2 * W <= width; d += 2 * W) {
    add_values_block<R, 2>(p, shifted, count, width, out + d);
    for (int j = 0; j < count; ++j) shifted[j] += 2 * W;
  }
  for (; d < width; d += W) {
    add_values_block<R, 1>(p, shifted, count, width, out + d);
    for (int j = 0; j < count; ++j) shifted[j] += W;
  }
}

// out[r] += sum over keys of p[r][key] * values[key]
void add_values(const float* p, int64_t rows, const float* const* values, int count, int64_t width, float* out) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) add_values_rows<4>(p + r * TILE, values, count, width, out + r * width);
  for (; r < rows; ++r) add_values_rows<1>(p + r * TILE, values, count, width, out + r * width);
}

// One tile of scores of one row becomes weights; the row's running state and output follow.
void weigh(float* s, int count, float cap, float& peak, float& total, float* out, int64_t width) {
  vf best = all(-INF);
  for (int j = 0; j < TILE; j += W) {
    vf x = load(s + j);
    if (cap > 0) {
      x = capped(x, cap);
      store(s + j, x);
    }
  }
  for (int j = 0; j < TILE; j += W) {
    const vf x = lanes() + j < count ? load(s + j) : all(-INF);
    store(s + j, x);
    best = x > best ? x : best;
  }
  const float top = std::max(peak, largest(best)[0]);
  if (top == -INF) {
    for (int j = 0; j < TILE; ++j) s[j] = s[j] == s[j] ? 0.0f : s[j];
    return;
  }
  if (top != peak) {
    if (peak != -INF) {  // else nothing was added yet
      const float shrink = std::exp(peak - top);
      total *= shrink;
      for (int64_t d = 0; d < width; d += W) store(out + d, load(out + d) * all(shrink));
    }
    peak = top;
  }
  vf sum = {};
  for (int j = 0; j < TILE; j += W) {
    const vf x = exponential(load(s + j) - all(top));
    store(s + j, x);
    sum += x;
  }
  total += summed(sum)[0];
}

struct Rows {  // where the rows of one tile lie
  const float* keys[TILE];
  const float* values[TILE];
};

template <typename T>
const float* row_of(const Pool& pool, int64_t page, int64_t token, int64_t head, float* buffer, bool direct) {
  const T* from = static_cast<const T*>(pool.data) + page * pool.page + token * pool.token + head * pool.head;
  if constexpr (is_code<T>) {
    widen_codes(from, buffer, pool.width, pool.scales.at(page, token, head));
    for (int64_t i = pool.width; i < pool.padded; ++i) buffer[i] = 0;
    return buffer;
  }
  if constexpr (std::is_same_v<T, float>) {
    if (direct) return from;
  }
  if constexpr (!is_code<T>) widen(from, buffer, pool.width);
  for (int64_t i = pool.width; i < pool.padded; ++i) buffer[i] = 0;
  return buffer;
}

inline void fetch(const void* data, int64_t element, int64_t offset, int64_t width) {
  const char* from = static_cast<const char*>(data) + offset * element;
  for (int64_t byte = 0; byte < width * element; byte += 64) __builtin_prefetch(from + byte, 0, 3);
}

// Asks for one key and value early: pages lie anywhere, the hardware cannot guess. One row at a time, between
// the rows of work: a burst of such requests is dropped.
inline void fetch_row(const Call& c, int64_t element, int64_t page, int64_t token, int64_t head) {
  fetch(c.k[0].data, element, page * c.k[0].page + token * c.k[0].token + head * c.k[0].head, c.k[0].width);
  if (!c.latent) fetch(c.v.data, element, page * c.v.page + token * c.v.token + head * c.v.head, c.v.width);
}

template <typename T>
void find_rows(
    const Call& c, int64_t b, int64_t head, int64_t start, int64_t end, int64_t next_head,
    Scratch& scratch, Rows& rows) {
  const int count = int(std::min<int64_t>(TILE, end - start));
  const bool direct_keys = c.k[0].width == c.k[0].padded && !c.latent;
  const bool direct_values = c.v.width == c.v.padded;
  int64_t page = 0, token = c.tables ? 0 : c.cu_k.at(0, b) + start, entry = 0;
  if (c.tables) {
    entry = start / c.page_size;
    token = start % c.page_size;
    page = c.table.at(b, entry);
  }
  for (int j = 0; j < count; ++j, ++token) {
    if (c.tables && token == c.page_size) {
      token = 0;
      page = c.table.at(b, ++entry);
    }
    if (next_head > head) {
      fetch_row(c, sizeof(T), page, token, next_head);
    } else if (const int64_t later = start + TILE + j; later < end) {
      const int64_t there = c.tables ? c.table.at(b, later / c.page_size) : 0;
      fetch_row(c, sizeof(T), there, c.tables ? later % c.page_size : token + TILE, next_head);
    }
    float* buffer = scratch.keys + j * c.key_width;
    rows.keys[j] = row_of<T>(c.k[0], page, token, head, buffer, direct_keys);
    if (c.latent) {
      row_of<T>(c.k[1], page, token, head, buffer + c.k[0].padded, false);
      rows.values[j] = buffer;
    } else {
      rows.values[j] = row_of<T>(c.v, page, token, head, scratch.values + j * c.value_width, direct_values);
    }
  }
  for (int j = count; j < TILE; ++j) rows.keys[j] = rows.keys[0];
}

void load_queries(const Call& c, const Item& item, float* to) {
  const int64_t size = c.q_type == at::kFloat ? 4 : 2;
  for (int64_t h = 0; h < item.heads; ++h)
    for (int64_t t = 0; t < item.tokens; ++t)
      for (int64_t g = 0; g < item.lanes; ++g, to += c.key_width) {
        const int64_t head = (item.head + h) * c.group + item.lane + g;
        int64_t at = 0;
        for (const Pool& part : c.q) {
          if (!part.data) continue;
          const char* from = static_cast<const char*>(part.data) + ((item.token + t) * part.token + head * part.head) * size;
          widen_any(from, c.q_type, to + at, part.width);
          for (int64_t i = 0; i < part.width; ++i) to[at + i] *= c.scale;
          for (int64_t i = part.width; i < part.padded; ++i) to[at + i] = 0;
          at += part.padded;
        }
      }
}

void store_outputs(const Call& c, const Item& item, const Scratch& scratch) {
  const int64_t size = c.q_type == at::kFloat ? 4 : 2, heads = c.key_heads * c.group;
  int64_t row = 0;
  for (int64_t h = 0; h < item.heads; ++h)
    for (int64_t t = 0; t < item.tokens; ++t)
      for (int64_t g = 0; g < item.lanes; ++g, ++row) {
        float* out = scratch.out + row * c.value_width;
        const float total = scratch.total[row];
        const float share = total == 0 ? 0.0f : 1.0f / total;
        for (int64_t d = 0; d < c.value_width; d += W) store(out + d, load(out + d) * all(share));
        const int64_t place = (item.token + t) * heads + (item.head + h) * c.group + item.lane + g;
        narrow_any(out, c.out + place * c.v.width * size, c.q_type, c.v.width);
        if (c.lse) c.lse[place] = total == 0 ? -INF : scratch.peak[row] + std::log(total);
      }
}

template <typename T>
void run_item(const Call& c, const Item& item, Scratch& scratch) {
  const int64_t b = item.sequence, length = c.length(b), each = item.tokens * item.lanes;
  const int64_t rows = each * item.heads;
  scratch.fit(rows, c.key_width, c.value_width);
  load_queries(c, item, scratch.q);
  std::fill(scratch.out, scratch.out + rows * c.value_width, 0.0f);
  std::fill(scratch.peak, scratch.peak + rows, -INF);
  std::fill(scratch.total, scratch.total + rows, 0.0f);
  // The key on the diagonal of the item's first query, and the keys that any of its queries sees.
  const int64_t diagonal = length - (c.first(b + 1) - c.first(b)) + (item.token - c.first(b));
  const int64_t from = c.left < 0 ? 0 : std::max<int64_t>(0, diagonal - c.left);
  const int64_t to = c.right < 0 ? length : std::min(length, diagonal + item.tokens + c.right);
  for (int64_t start = from / TILE * TILE; start < to; start += TILE) {
    const int count = int(std::min<int64_t>(TILE, to - start));
    for (int64_t h = 0; h < item.heads; ++h) {
      Rows tile;
      const int64_t next = h + 1 < item.heads ? item.head + h + 1 : item.head;
      find_rows<T>(c, b, item.head + h, start, to, next, scratch, tile);
      float* out = scratch.out + h * each * c.value_width;
      const float* queries = scratch.q + h * each * c.key_width;
      if (each < FEW) {
        multiply_keys(queries, each, tile.keys, c.key_width, count, scratch.score);
      } else {
        turn_keys(tile.keys, c.key_width, count, scratch.turned);
        multiply_turned(queries, each, scratch.turned, c.key_width, count, scratch.score);
      }
      for (int64_t r = 0; r < each; ++r) {
        const int64_t position = diagonal + r / item.lanes;
        const int64_t low = c.left < 0 ? 0 : std::max<int64_t>(0, position - c.left - start);
        const int64_t high = c.right < 0 ? count : std::min<int64_t>(count, position + c.right + 1 - start);
        float* s = scratch.score + r * TILE;
        if (c.softcap > 0 && low > 0) {  // hide after the cap, which would make -inf finite
          for (int j = 0; j < TILE; j += W) store(s + j, capped(load(s + j), c.softcap));
        }
        for (int64_t j = 0; j < std::min<int64_t>(low, TILE); ++j) s[j] = -INF;
        weigh(
            s, int(std::max<int64_t>(high, 0)), low > 0 ? 0.0f : c.softcap, scratch.peak[h * each + r],
            scratch.total[h * each + r], out + r * c.value_width, c.value_width);
      }
      add_values(scratch.score, each, tile.values, count, c.value_width, out);
    }
  }
  store_outputs(c, item, scratch);
}

std::vector<Item> items_of(const Call& c, int threads) {
  std::vector<Item> items;
  const int64_t lanes = std::min<int64_t>(c.group, ROWS);
  const int64_t block = std::max<int64_t>(1, ROWS / lanes);
  for (int64_t b = 0; b < c.batch; ++b) {
    const int64_t begin = c.first(b), end = c.first(b + 1);
    // A single query takes several key heads at once, which reads a page from front to back, but leaves
    // enough items for all threads.
    int64_t heads = 1;
    if (end - begin == 1 && !c.latent) {
      heads = std::max<int64_t>(1, std::min(c.key_heads, ITEM_ROWS / lanes));
      heads = std::min(heads, std::max<int64_t>(1, c.key_heads * c.batch / (2 * threads)));
    }
    for (int64_t t = begin; t < end; t += block)
      for (int64_t h = 0; h < c.key_heads; h += heads)
        for (int64_t g = 0; g < c.group; g += lanes)
          items.push_back({b, t, std::min(block, end - t), h, std::min(heads, c.key_heads - h), g, std::min(lanes, c.group - g)});
  }
  return items;
}

// The lengths fit the tables, the pages exist, no sequence has one twice.
bool fits(const Call& c) {
  if (c.has_cu) {
    if (c.cu.at(0, 0) != 0 || c.cu.at(0, c.batch) != c.tokens) return false;
    for (int64_t b = 0; b < c.batch; ++b)
      if (c.cu.at(0, b + 1) < c.cu.at(0, b)) return false;
  }
  if (!c.tables) {
    if (c.cu_k.at(0, 0) != 0 || c.cu_k.at(0, c.batch) != c.pages) return false;
    for (int64_t b = 0; b < c.batch; ++b)
      if (c.cu_k.at(0, b + 1) < c.cu_k.at(0, b)) return false;
    return true;
  }
  thread_local std::vector<uint32_t> seen;
  thread_local uint32_t mark = 0;
  if (int64_t(seen.size()) < c.pages) seen.resize(c.pages, 0);
  for (int64_t b = 0; b < c.batch; ++b) {
    const int64_t length = c.lens.at(0, b);
    if (length < 0 || length > c.table_width * c.page_size) return false;
    if (++mark == 0) {
      std::fill(seen.begin(), seen.end(), 0u);
      mark = 1;
    }
    const int64_t used = (length + c.page_size - 1) / c.page_size;
    for (int64_t e = 0; e < used; ++e) {
      const int64_t page = c.table.at(b, e);
      if (page < 0 || page >= c.pages || seen[page] == mark) return false;
      seen[page] = mark;
    }
  }
  return true;
}

bool run(const Call& c, at::ScalarType kv) {
  pybind11::gil_scoped_release release;
  if (!fits(c)) return false;
  const int threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const std::vector<Item> items = items_of(c, threads);
  spread(int64_t(items.size()), [&](int64_t i) {
    thread_local Scratch scratch;
    if (with_code(kv, [&](auto code) { run_item<decltype(code)>(c, items[i], scratch); })) return;
    if (kv == at::kFloat) run_item<float>(c, items[i], scratch);
    else if (kv == at::kBFloat16) run_item<BF16>(c, items[i], scratch);
    else run_item<_Float16>(c, items[i], scratch);
  });
  return true;
}

int64_t whole(int64_t n) { return (n + W - 1) / W * W; }

Pool rows(const at::Tensor& t) {  // (T, H, D)
  return {t.const_data_ptr(), 0, t.stride(0), t.stride(1), t.size(2), whole(t.size(2))};
}

Indices indices(const at::Tensor& t) {
  const bool matrix = t.dim() == 2;
  return {t.const_data_ptr(), t.scalar_type() == at::kLong, matrix ? t.stride(0) : 0, t.stride(matrix ? 1 : 0)};
}

Call common(
    const at::Tensor& out, const std::optional<at::Tensor>& lse, const at::Tensor& q, double scale, int64_t left,
    int64_t right, double softcap) {
  Call c{};
  c.tokens = q.size(0);
  c.q[0] = rows(q);
  c.q_type = q.scalar_type();
  c.left = left;
  c.right = right;
  c.scale = float(scale);
  c.softcap = float(softcap);
  c.out = static_cast<char*>(out.mutable_data_ptr());
  c.lse = lse ? lse->mutable_data_ptr<float>() : nullptr;
  return c;
}

void put_tables(Call& c, const at::Tensor& tables, const at::Tensor& lens, const std::optional<at::Tensor>& cu) {
  c.tables = true;
  c.batch = tables.size(0);
  c.table_width = tables.size(1);
  c.table = indices(tables);
  c.lens = indices(lens);
  c.has_cu = cu.has_value();
  if (cu) c.cu = indices(*cu);
}

// Memory is read: what only a flag negates is negated before.
bool paged(
    const at::Tensor& out, const std::optional<at::Tensor>& lse, const at::Tensor& q_in, const at::Tensor& k_in,
    const at::Tensor& v_in, const at::Tensor& tables, const at::Tensor& lens, const std::optional<at::Tensor>& cu,
    double scale, int64_t left, int64_t right, double softcap, bool heads_first,
    const std::optional<at::Tensor>& k_scale, const std::optional<at::Tensor>& v_scale) {
  const at::Tensor q = q_in.resolve_neg(), k = k_in.resolve_neg(), v = v_in.resolve_neg();
  Call c = common(out, lse, q, scale, left, right, softcap);
  const int token = heads_first ? 2 : 1, head = heads_first ? 1 : 2;
  c.k[0] = {k.const_data_ptr(), k.stride(0), k.stride(token), k.stride(head), k.size(3), whole(k.size(3))};
  c.v = {v.const_data_ptr(), v.stride(0), v.stride(token), v.stride(head), v.size(3), whole(v.size(3))};
  c.k[0].scales = scales(k_scale, 0, token, head);
  c.v.scales = scales(v_scale, 0, token, head);
  c.key_heads = k.size(head);
  c.group = q.size(1) / c.key_heads;
  c.pages = k.size(0);
  c.page_size = k.size(token);
  c.key_width = c.k[0].padded;
  c.value_width = c.v.padded;
  put_tables(c, tables, lens, cu);
  return run(c, k.scalar_type());
}

bool latent(
    const at::Tensor& out, const std::optional<at::Tensor>& lse, const at::Tensor& q_in, const at::Tensor& q_pe_in,
    const at::Tensor& ckv_in, const at::Tensor& kpe_in, const at::Tensor& tables, const at::Tensor& lens,
    const std::optional<at::Tensor>& cu, double scale, int64_t right, const std::optional<at::Tensor>& ckv_scale,
    const std::optional<at::Tensor>& kpe_scale) {
  const at::Tensor q = q_in.resolve_neg(), q_pe = q_pe_in.resolve_neg();
  const at::Tensor ckv = ckv_in.resolve_neg(), kpe = kpe_in.resolve_neg();
  Call c = common(out, lse, q, scale, -1, right, 0.0);
  c.latent = true;
  c.q[1] = rows(q_pe);
  c.k[0] = {ckv.const_data_ptr(), ckv.stride(0), ckv.stride(1), 0, ckv.size(2), whole(ckv.size(2))};
  c.k[1] = {kpe.const_data_ptr(), kpe.stride(0), kpe.stride(1), 0, kpe.size(2), whole(kpe.size(2))};
  c.k[0].scales = scales(ckv_scale, 0, 1, -1);
  c.k[1].scales = scales(kpe_scale, 0, 1, -1);
  c.v = c.k[0];
  c.key_heads = 1;
  c.group = q.size(1);
  c.pages = ckv.size(0);
  c.page_size = ckv.size(1);
  c.key_width = c.k[0].padded + c.k[1].padded;
  c.value_width = c.k[0].padded;
  put_tables(c, tables, lens, cu);
  return run(c, ckv.scalar_type());
}

bool ragged(
    const at::Tensor& out, const std::optional<at::Tensor>& lse, const at::Tensor& q_in, const at::Tensor& k_in,
    const at::Tensor& v_in, const at::Tensor& cu, const at::Tensor& cu_k, double scale, int64_t left, int64_t right,
    double softcap, const std::optional<at::Tensor>& k_scale, const std::optional<at::Tensor>& v_scale) {
  const at::Tensor q = q_in.resolve_neg(), k = k_in.resolve_neg(), v = v_in.resolve_neg();
  Call c = common(out, lse, q, scale, left, right, softcap);
  c.k[0] = rows(k);
  c.v = rows(v);
  c.k[0].scales = scales(k_scale, -1, 0, 1);
  c.v.scales = scales(v_scale, -1, 0, 1);
  c.key_heads = k.size(1);
  c.group = q.size(1) / c.key_heads;
  c.pages = k.size(0);
  c.batch = cu.size(0) - 1;
  c.has_cu = true;
  c.cu = indices(cu);
  c.cu_k = indices(cu_k);
  c.key_width = c.k[0].padded;
  c.value_width = c.v.padded;
  return run(c, k.scalar_type());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("paged", reading(&paged));
  m.def("latent", reading(&latent));
  m.def("ragged", reading(&ragged));
  m.def("append", reading(&append::append));
  m.def("append_codes", reading(&append::append_codes));
}
