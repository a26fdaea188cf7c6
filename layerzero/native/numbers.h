// A part of hot.cpp: logits, probabilities and the numbers of each row beside them, checked in one pass.
//
// The twins of `_validate_rows` in ops/sampling.py and of `_guard` in ops/verify.py. The answers are those of indices.h:
// the arguments, with copies of what has to stay as it was checked; None where a value does not fit (Python finds out
// which and says so); NotImplemented for what is no small plain tensor on the CPU.

#pragma once

// Loops over many elements, several at a time: -O2 leaves that to the flags of GCC, and clang does it anyway.
#if defined(__GNUC__) && !defined(__clang__)
#define SEVERAL_AT_A_TIME __attribute__((optimize("O3")))
#else
#define SEVERAL_AT_A_TIME
#endif

// How the bits of a dtype's elements are read. What lies above `infinity` without its sign is NaN.
struct Floating {
  size_t size;  // 0: not read here
  uint64_t infinity, sign;
};

Floating floating_of(const c10::TensorImpl* impl) {
  switch (impl->dtype().toScalarType()) {
    case c10::ScalarType::Double: return {8, 0x7FF0000000000000u, 0x8000000000000000u};
    case c10::ScalarType::Float: return {4, 0x7F800000u, 0x80000000u};
    case c10::ScalarType::BFloat16: return {2, 0x7F80u, 0x8000u};
    case c10::ScalarType::Half: return {2, 0x7C00u, 0x8000u};
    default: return {0, 0, 0};
  }
}

// Bytes up to which one thread looks at them under the interpreter's lock.
constexpr size_t MAX_BYTES = 1 << 17;

// The tensor if it is one of floating point, of `axes` axes, that may be looked at here, else null.
c10::TensorImpl* floats_of(PyObject* object, int64_t axes) {
  c10::TensorImpl* impl = plain(object);
  const bool ours = impl != nullptr && impl->device().is_cpu() && impl->dim() == axes;
  return ours && floating_of(impl).size != 0 && size_t(impl->numel()) * impl->itemsize() <= MAX_BYTES ? impl : nullptr;
}

// The largest of some elements is finite where none is NaN or +inf, and one is not -inf.
struct FiniteLargest {
  template <typename Bits, bool Dense>
  SEVERAL_AT_A_TIME static bool holds(const Bits* row, int64_t count, int64_t step, Floating kind) {
    const auto infinity = Bits(kind.infinity), magnitude = Bits(~kind.sign), least = Bits(kind.infinity | kind.sign);
    Bits wrong = 0, finite = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Bits bits = row[Dense ? i : i * step];
      const auto usual = Bits(Bits(bits & magnitude) < infinity);
      wrong |= Bits(usual ^ 1) & Bits(bits != least);
      finite |= usual;
    }
    return !wrong && finite;
  }
};

// No element is below 0 or NaN; a zero may have a sign.
struct NoneNegative {
  template <typename Bits, bool Dense>
  SEVERAL_AT_A_TIME static bool holds(const Bits* row, int64_t count, int64_t step, Floating kind) {
    const auto infinity = Bits(kind.infinity), minus_zero = Bits(kind.sign);
    Bits wrong = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Bits bits = row[Dense ? i : i * step];
      wrong |= Bits(bits > infinity) & Bits(bits != minus_zero);
    }
    return !wrong;
  }
};

template <typename Check, typename Bits>
bool each_row_of(const c10::TensorImpl* impl, Floating kind) {
  const auto sizes = impl->sizes(), strides = impl->strides();
  const size_t last = sizes.size() - 1;
  const int64_t count = sizes[last], step = strides[last];
  const int64_t blocks = last > 1 ? sizes[0] : 1, apart = last > 1 ? strides[0] : 0;
  const auto* data = static_cast<const Bits*>(impl->data());
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t row = 0; row < sizes[last - 1]; ++row) {
      const Bits* from = data + block * apart + row * strides[last - 1];
      const bool holds = step == 1 ? Check::template holds<Bits, true>(from, count, step, kind)
                                   : Check::template holds<Bits, false>(from, count, step, kind);
      if (!holds) return false;
    }
  return true;
}

// Whether it holds for each row, along the last of two or three axes.
template <typename Check>
bool each_row(const c10::TensorImpl* impl) {
  const Floating kind = floating_of(impl);
  if (kind.size == 8) return each_row_of<Check, uint64_t>(impl, kind);
  return kind.size == 4 ? each_row_of<Check, uint32_t>(impl, kind) : each_row_of<Check, uint16_t>(impl, kind);
}

template <typename Number>
bool all_between(const at::Tensor& own, double low, double high) {
  const auto* values = own.const_data_ptr<Number>();
  for (int64_t i = 0; i < own.numel(); ++i)
    if (!(double(values[i]) >= low && double(values[i]) <= high)) return false;
  return true;
}

// Whether a dense tensor of numbers, one a row, can be looked at here, and whether all lie in [low, high].
enum Between { YES, NO, UNKNOWN };
Between between(const at::Tensor& own, double low, double high) {
  switch (own.scalar_type()) {
    case c10::ScalarType::Double: return all_between<double>(own, low, high) ? YES : NO;
    case c10::ScalarType::Float: return all_between<float>(own, low, high) ? YES : NO;
    case c10::ScalarType::BFloat16: return all_between<c10::BFloat16>(own, low, high) ? YES : NO;
    case c10::ScalarType::Half: return all_between<c10::Half>(own, low, high) ? YES : NO;
    case c10::ScalarType::Long: return all_between<int64_t>(own, low, high) ? YES : NO;
    case c10::ScalarType::Int: return all_between<int32_t>(own, low, high) ? YES : NO;
    default: return UNKNOWN;
  }
}

// The arguments with others at some places.
PyObject* replaced(PyObject* args, Py_ssize_t from, Ref* others, Py_ssize_t count) {
  const Py_ssize_t all = PyTuple_GET_SIZE(args);
  PyObject* full = PyTuple_New(all);
  for (Py_ssize_t i = 0; full != nullptr && i < all; ++i) {
    const bool other = i >= from && i < from + count && others[i - from];
    PyTuple_SET_ITEM(full, i, other ? others[i - from].release() : Ref::to(PyTuple_GET_ITEM(args, i)).release());
  }
  return full;
}

// rows_within(args, {name: (low, high), ...}): the arguments, where each row of the first has a finite largest element
// and those behind it, in order, lie within the bounds; of those that are tensors the copies that were checked.
PyObject* rows_within(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 2 || !PyTuple_CheckExact(given[0]) || !PyDict_CheckExact(given[1])) return not_ours();
  PyObject *args = given[0], *name, *bounds;
  const Py_ssize_t all = PyTuple_GET_SIZE(args);
  c10::TensorImpl* logits = all > 0 ? floats_of(PyTuple_GET_ITEM(args, 0), 2) : nullptr;
  if (logits == nullptr || logits->size(0) == 0 || all > MAX_PARAMETERS || modes_here() < 0 || forward_level())
    return not_ours();
  return guarded([&]() -> PyObject* {
    if (!each_row<FiniteLargest>(logits)) return none();
    Ref own[MAX_PARAMETERS];
    bool copied = false;
    Py_ssize_t at = 0, position = 0;
    while (PyDict_Next(given[1], &at, &name, &bounds)) {
      if (++position >= all) return not_ours();
      PyObject* value = PyTuple_GET_ITEM(args, position);
      if (!is_tensor(value)) continue;
      double low, high;
      c10::TensorImpl* impl = plain(value);
      if (impl == nullptr || !impl->device().is_cpu() || impl->dim() != 1 || impl->numel() > MAX_INDICES ||
          needs_graph(impl))
        return not_ours();
      if (!PyArg_ParseTuple(bounds, "dd", &low, &high)) return nullptr;
      at::Tensor copy = copy_of(impl);
      const Between fits = between(copy, low, high);
      if (fits != YES) return fits == NO ? none() : not_ours();
      own[position] = Ref(THPVariable_Wrap(std::move(copy)));
      if (!own[position]) return nullptr;
      copied = true;
    }
    if (!copied) return Ref::to(args).release();
    return replaced(args, 0, own, all);
  });
}

// proposals(args): the arguments (draft, tokens, target, ...) with the copy of tokens that was checked: each is in the
// vocabulary, but for the first of a row where parents, a tuple, stand behind the target; no probability is below 0.
PyObject* proposals(PyObject*, PyObject* args) {
  if (!PyTuple_CheckExact(args) || PyTuple_GET_SIZE(args) < 4) return not_ours();
  c10::TensorImpl *draft = floats_of(PyTuple_GET_ITEM(args, 0), 3), *target = floats_of(PyTuple_GET_ITEM(args, 2), 3);
  c10::TensorImpl* tokens = indices_of(PyTuple_GET_ITEM(args, 1));
  if (draft == nullptr || target == nullptr || tokens == nullptr || tokens->dim() != 2 || draft->size(0) == 0 ||
      modes_here() < 0)
    return not_ours();
  return guarded([&]() -> PyObject* {
    at::Tensor copy = copy_of(tokens);
    const int64_t rows = copy.size(0), places = copy.size(1), vocab = draft->size(2);
    const int64_t first = PyTuple_Check(PyTuple_GET_ITEM(args, 3)) ? 1 : 0;
    const bool known_words = over(copy, [&](const auto* ids) {
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t at = row * places + first; at < (row + 1) * places; ++at)
          if (ids[at] < 0 || int64_t(ids[at]) >= vocab) return false;
      return true;
    });
    if (!known_words || !each_row<NoneNegative>(draft) || !each_row<NoneNegative>(target)) return none();
    Ref own(THPVariable_Wrap(std::move(copy)));
    return own ? replaced(args, 1, &own, 1) : nullptr;
  });
}
