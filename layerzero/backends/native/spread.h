// Items of work on all of torch's threads.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

namespace {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls work(item), or work(item, worker), for every item; who is free takes the next.
template <typename Work>
void spread(int64_t items, const Work& work) {
  std::atomic<int64_t> next{0};
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  at::parallel_for(0, std::min(items, threads), 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;)
        if constexpr (std::is_invocable_v<Work, int64_t, int64_t>)
          work(item, worker);
        else
          work(item);
  });
}

}  // namespace
