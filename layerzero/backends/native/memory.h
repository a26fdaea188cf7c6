// Entry points for Python whose tensors have memory of their own.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace {

inline void need_memory(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.key_set().has(c10::DispatchKey::Python), "the tensor's class keeps its values elsewhere");
}
inline void need_memory(const std::optional<at::Tensor>& tensor) {
  if (tensor) need_memory(*tensor);
}
template <typename Other>
void need_memory(const Other&) {}

// `function`, called with tensors that have memory: an instance of a class with `__torch_dispatch__` may hold a null
// pointer, and torch hands that out without a word.
template <typename Result, typename... Args>
auto reading(Result (*function)(Args...)) {
  return [function](Args... args) -> Result {
    (need_memory(args), ...);
    return function(args...);
  };
}

}  // namespace
