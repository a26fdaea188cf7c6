// Rows of new keys and values into their places in a pool of pages.
//
// All slots are looked at before the first byte is written, so a call that does not fit changes nothing.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

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
bool fit(const std::vector<Index>& slots, int64_t places) {
  bool rising = true;
  Index before = -1;
  for (const Index slot : slots) {
    if (slot < 0 || int64_t(slot) >= places) return false;
    rising = rising && slot > before;
    before = slot;
  }
  if (rising) return true;  // as a prompt's slots in fresh pages are
  thread_local std::vector<Index> sorted;
  sorted = slots;
  std::sort(sorted.begin(), sorted.end());
  return std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
}

template <typename Index>
bool run(const Target& keys, const Target& values, const at::Tensor& slots, int64_t page_size, int64_t places) {
  const Index* given = slots.const_data_ptr<Index>();
  const int64_t step = slots.stride(0), count = slots.size(0);
  std::vector<Index> at(count);  // others may write to what was given while this runs
  for (int64_t i = 0; i < count; ++i) at[i] = given[i * step];
  if (!fit(at, places)) return false;
  const int64_t bytes = keys.heads * keys.bytes + values.heads * values.bytes;
  const int64_t grain = std::max<int64_t>(1, (int64_t(1) << 18) / std::max<int64_t>(1, bytes));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = at[i], page = slot / page_size, token = slot % page_size;
      write(keys, i, page, token);
      write(values, i, page, token);
    }
  });
  return true;
}

// False where the slots do not fit; nothing is written then.
inline bool append(
    const at::Tensor& k, const at::Tensor& v, const at::Tensor& k_pages, const at::Tensor& v_pages,
    const at::Tensor& slots, bool heads_first) {
  TORCH_CHECK(
      k.scalar_type() == k_pages.scalar_type() && v.scalar_type() == v_pages.scalar_type(),
      "rows need the pool's dtype");
  const Target keys = target_of(k, k_pages, heads_first), values = target_of(v, v_pages, heads_first);
  const int64_t page_size = k_pages.size(heads_first ? 2 : 1), places = k_pages.size(0) * page_size;
  bool done;
  {
    pybind11::gil_scoped_release release;
    done = slots.scalar_type() == at::kLong ? run<int64_t>(keys, values, slots, page_size, places)
                                            : run<int32_t>(keys, values, slots, page_size, places);
  }
  if (done)  // as torch's own in-place functions do, so that autograd sees the change
    for (const at::Tensor* pool : {&k_pages, &v_pages})
      if (!pool->is_inference()) pool->unsafeGetTensorImpl()->bump_version();
  return done;
}

}  // namespace append
