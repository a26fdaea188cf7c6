// Rows of new keys and values into their places in a pool of pages.
//
// All slot_mapping are looked at before the first byte is written, so a call that does not fit changes nothing.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "eight_bits.h"

namespace append {

struct Target {  // one pool and the rows for it; strides in bytes, the last axis of both is dense
  char* pool;
  const char* rows;
  int64_t page, token, head;        // the pool's
  int64_t row_token, row_head;      // the rows'
  int64_t heads, bytes;             // bytes of one head's row
};

inline Target target_of(const at::Tensor& rows, const at::Tensor& pool, bool heads_first) {
  const int64_t size = int64_t(pool.element_size());
  const int token = heads_first ? 2 : 1, head = heads_first ? 1 : 2;
  Target t{
      static_cast<char*>(pool.mutable_data_ptr()), static_cast<const char*>(rows.const_data_ptr()),
      pool.stride(0) * size, pool.stride(token) * size, pool.stride(head) * size,
      rows.stride(0) * size, rows.stride(1) * size, rows.size(1), rows.size(2) * size};
  if (t.head == t.bytes && t.row_head == t.bytes) {  // a token's heads stand behind each other on both sides
    t.bytes *= t.heads;
    t.heads = 1;
  }
  return t;
}

inline void write(const Target& t, int64_t row, int64_t page, int64_t token) {
  char* to = t.pool + page * t.page + token * t.token;
  const char* from = t.rows + row * t.row_token;
  for (int64_t h = 0; h < t.heads; ++h) std::memcpy(to + h * t.head, from + h * t.row_head, t.bytes);
}

// Every slot is one of the pool's, and no two are the same.
template <typename Index>
bool fit(const std::vector<Index>& slot_mapping, int64_t places) {
  bool rising = true;
  Index before = -1;
  for (const Index slot : slot_mapping) {
    if (slot < 0 || int64_t(slot) >= places) return false;
    rising = rising && slot > before;
    before = slot;
  }
  if (rising) return true;  // as a prompt's slot_mapping in fresh pages are
  thread_local std::vector<Index> sorted;
  sorted = slot_mapping;
  std::sort(sorted.begin(), sorted.end());
  return std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
}

// `put(row, page, token)` for every row, once all slots were looked at; `bytes` is what one of them moves.
template <typename Index, typename Put>
bool run(int64_t bytes, const at::Tensor& slot_mapping, int64_t page_size, int64_t places, Put&& put) {
  const Index* given = slot_mapping.const_data_ptr<Index>();
  const int64_t step = slot_mapping.stride(0), count = slot_mapping.size(0);
  std::vector<Index> at(count);  // others may write to what was given while this runs
  for (int64_t i = 0; i < count; ++i) at[i] = given[i * step];
  if (!fit(at, places)) return false;
  const int64_t grain = std::max<int64_t>(1, (int64_t(1) << 18) / std::max<int64_t>(1, bytes));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = at[i];
      put(i, slot / page_size, slot % page_size);
    }
  });
  return true;
}

// The bytes that a tensor's elements lie between.
struct Span {
  explicit Span(const at::Tensor& t) : begin(static_cast<const char*>(t.const_data_ptr())), end(begin) {
    int64_t last = 0;
    for (int64_t axis = 0; axis < t.dim(); ++axis) last += (t.size(axis) - 1) * t.stride(axis);
    if (t.numel() > 0) end += (last + 1) * int64_t(t.element_size());
  }
  bool meets(const Span& other) const { return begin < other.end && other.begin < end; }
  const char *begin, *end;
};

// Rows as they are written to `pool`: negated where one of the two only says so by a flag, copied where they may
// be rows of a pool themselves, which an earlier token would change under a later one.
inline at::Tensor ready(const at::Tensor& rows, const at::Tensor& pool, const Span& first, const Span& second) {
  const at::Tensor plain = pool.is_neg() ? rows.neg() : rows.resolve_neg();
  const Span own(plain);
  return own.meets(first) || own.meets(second) ? plain.clone() : plain;
}

inline at::Tensor plain(const at::Tensor& pool) { return pool.is_neg() ? pool._neg_view() : pool; }

template <typename Put>
bool put_all(const at::Tensor& slot_mapping, int64_t bytes, int64_t page_size, int64_t places, Put&& put) {
  pybind11::gil_scoped_release release;
  return slot_mapping.scalar_type() == at::kLong ? run<int64_t>(bytes, slot_mapping, page_size, places, put)
                                                 : run<int32_t>(bytes, slot_mapping, page_size, places, put);
}

// As torch's own in-place functions do, so that autograd sees the change.
inline void note_changes(std::initializer_list<const at::Tensor*> changed) {
  for (const at::Tensor* tensor : changed)
    if (!tensor->is_inference()) tensor->unsafeGetTensorImpl()->bump_version();
}

// A pool of codes, strides in bytes; its rows are of another size, and their strides are theirs.
inline Target pool_of(const at::Tensor& pool, const at::Tensor& rows, int token, int head) {
  Target t{};
  t.pool = static_cast<char*>(pool.mutable_data_ptr());
  t.rows = static_cast<const char*>(rows.const_data_ptr());
  t.page = pool.stride(0);
  t.token = pool.stride(token);
  t.head = pool.stride(head);
  return t;
}

// False where the slot_mapping do not fit; nothing is written then.
inline bool append(
    const at::Tensor& k_in, const at::Tensor& v_in, const at::Tensor& k_pool, const at::Tensor& v_pool,
    const at::Tensor& slot_mapping, bool heads_first) {
  TORCH_CHECK(
      k_in.scalar_type() == k_pool.scalar_type() && v_in.scalar_type() == v_pool.scalar_type(),
      "rows need the pool's dtype");
  const at::Tensor k_cache = plain(k_pool), v_cache = plain(v_pool);
  const Span first(k_cache), second(v_cache);
  const at::Tensor k = ready(k_in, k_pool, first, second), v = ready(v_in, v_pool, first, second);
  const Target keys = target_of(k, k_cache, heads_first), values = target_of(v, v_cache, heads_first);
  const int64_t page_size = k_cache.size(heads_first ? 2 : 1), places = k_cache.size(0) * page_size;
  const auto put = [&](int64_t row, int64_t page, int64_t token) {
    write(keys, row, page, token);
    write(values, row, page, token);
  };
  const int64_t bytes = keys.heads * keys.bytes + values.heads * values.bytes;
  if (!put_all(slot_mapping, bytes, page_size, places, put)) return false;
  note_changes({&k_pool, &v_pool});
  return true;
}

// One row of numbers as codes; `own` takes the scale from the row, and writes it.
template <typename Code>
void write_codes(
    const at::Tensor& rows, const Target& t, const Scales& scales, bool own, int64_t row, int64_t page, int64_t token) {
  thread_local std::vector<float> wide;
  const int64_t width = rows.size(2);
  if (int64_t(wide.size()) < width) wide.resize(width);
  const int64_t size = int64_t(rows.element_size());
  for (int64_t h = 0; h < rows.size(1); ++h) {
    widen_any(t.rows + (row * rows.stride(0) + h * rows.stride(1)) * size, rows.scalar_type(), wide.data(), width);
    float& scale = scales.at(page, token, h);
    if (own) scale = scale_of<Code>(wide.data(), width);
    char* to = t.pool + page * t.page + token * t.token + h * t.head;
    narrow_codes(wide.data(), reinterpret_cast<Code*>(to), width, scale);
  }
}

// The same into pools of codes: rows of 16 or 32 bits are divided by their scale and rounded.
inline bool append_codes(
    const at::Tensor& k_in, const at::Tensor& v_in, const at::Tensor& k_cache, const at::Tensor& v_cache,
    const at::Tensor& slot_mapping, bool heads_first, const at::Tensor& k_scale, const at::Tensor& v_scale) {
  const Span first(k_cache), second(v_cache);
  const at::Tensor k = ready(k_in, k_cache, first, second), v = ready(v_in, v_cache, first, second);
  const int token = heads_first ? 2 : 1, head = heads_first ? 1 : 2;
  const bool own = k_scale.dim() > 1;
  const Target keys = pool_of(k_cache, k, token, head), values = pool_of(v_cache, v, token, head);
  const Scales key_scales = scales(k_scale, 0, token, head), value_scales = scales(v_scale, 0, token, head);
  const int64_t page_size = k_cache.size(token), bytes = k.size(1) * (k.size(2) + v.size(2)) * 4;
  bool done = false;
  with_code(k_cache.scalar_type(), [&](auto code) {
    using Code = decltype(code);
    done = put_all(slot_mapping, bytes, page_size, k_cache.size(0) * page_size,
                   [&](int64_t row, int64_t page, int64_t at) {
                     write_codes<Code>(k, keys, key_scales, own, row, page, at);
                     write_codes<Code>(v, values, value_scales, own, row, page, at);
                   });
  });
  if (!done) return false;
  note_changes({&k_cache, &v_cache});
  if (own) note_changes({&k_scale, &v_scale});
  return true;
}

}  // namespace append
