// A part of hot.cpp: ids, lengths, offsets and tables of pages, copied while they are checked.
//
// The twins of what `ops/checks.py` and `ops/paged/checks.py` do. Each function gives a dense copy that nobody else
// can write to, None where an element does not fit (Python finds out which and says so), and NotImplemented for what
// is no small plain tensor of int32 or int64 on the CPU, or where modes or transforms see what is read.

#pragma once

// Elements up to which one thread does this under the interpreter's lock.
constexpr int64_t MAX_INDICES = 1 << 16;

// The tensor if it is one that may be read here, else null.
c10::TensorImpl* indices_of(PyObject* object) {
  c10::TensorImpl* impl = plain(object);
  if (impl == nullptr || !impl->device().is_cpu() || impl->numel() > MAX_INDICES) return nullptr;
  const auto kind = impl->dtype().toScalarType();
  if (kind != c10::ScalarType::Long && kind != c10::ScalarType::Int) return nullptr;
  return impl->is_contiguous() || impl->dim() == 1 ? impl : nullptr;
}

at::Tensor copy_of(c10::TensorImpl* impl) {
  at::Tensor own = at::detail::empty_cpu(impl->sizes(), impl->dtype().toScalarType());
  const size_t size = impl->itemsize();
  auto* to = static_cast<char*>(own.mutable_data_ptr());
  const auto* from = static_cast<const char*>(impl->data());
  if (impl->is_contiguous()) {
    if (impl->numel() > 0) std::memcpy(to, from, size_t(impl->numel()) * size);
  } else {
    for (int64_t i = 0; i < impl->size(0); ++i) std::memcpy(to + i * size, from + i * impl->stride(0) * int64_t(size), size);
  }
  return own;
}

// check(pointer to the copy's elements), for either width of integer.
template <typename F>
bool over(const at::Tensor& own, F&& check) {
  return own.scalar_type() == at::kLong ? check(own.const_data_ptr<int64_t>()) : check(own.const_data_ptr<int32_t>());
}

// Whether no two of them are the same, each in [0, end).
template <typename Index>
bool distinct(const Index* values, int64_t count, int64_t end) {
  thread_local std::vector<Index> sorted;
  bool rising = true;
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] < 0 || int64_t(values[i]) >= end) return false;
    rising = rising && (i == 0 || values[i] > values[i - 1]);
  }
  if (rising) return true;
  sorted.assign(values, values + count);
  std::sort(sorted.begin(), sorted.end());
  return std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
}

bool whole_number(PyObject* object, int64_t& value) {
  if (!PyLong_Check(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return !overflow;
}

// The copy of one tensor under `check(elements, count)`.
template <typename F>
PyObject* checked(PyObject* object, F&& check) {
  c10::TensorImpl* impl = indices_of(object);
  if (impl == nullptr || modes_here() < 0) return not_ours();
  return guarded([&]() -> PyObject* {
    at::Tensor own = copy_of(impl);
    const int64_t count = own.numel();
    if (!over(own, [&](const auto* values) { return check(values, count); })) return none();
    return THPVariable_Wrap(std::move(own));
  });
}

// ids_below(tensor, end, ignored): each id is in [0, end), or is `ignored` where that is no None.
PyObject* ids_below(PyObject*, PyObject* const* args, Py_ssize_t count) {
  int64_t end, ignored = 0;
  if (count != 3 || !whole_number(args[1], end)) return not_ours();
  const bool some = args[2] != Py_None;
  if (some && !whole_number(args[2], ignored)) return not_ours();
  return checked(args[0], [&](const auto* values, int64_t size) {
    for (int64_t i = 0; i < size; ++i)
      if ((values[i] < 0 || int64_t(values[i]) >= end) && !(some && int64_t(values[i]) == ignored)) return false;
    return true;
  });
}

// offsets_to(tensor, end): from 0 to `end`, never falling.
PyObject* offsets_to(PyObject*, PyObject* const* args, Py_ssize_t count) {
  int64_t end;
  if (count != 2 || !whole_number(args[1], end)) return not_ours();
  return checked(args[0], [&](const auto* values, int64_t size) {
    if (size == 0 || values[0] != 0 || int64_t(values[size - 1]) != end) return false;
    for (int64_t i = 1; i < size; ++i)
      if (values[i] < values[i - 1]) return false;
    return true;
  });
}

// places_below(tensor, end): each in [0, end), none twice.
PyObject* places_below(PyObject*, PyObject* const* args, Py_ssize_t count) {
  int64_t end;
  if (count != 2 || !whole_number(args[1], end)) return not_ours();
  return checked(args[0], [&](const auto* values, int64_t size) { return distinct(values, size, end); });
}

// pages_of(tables, lengths, pages, tokens a page): copies of both, where each length fits its row of the table and what
// it reaches there are pages, none twice.
PyObject* pages_of(PyObject*, PyObject* const* args, Py_ssize_t count) {
  int64_t pages, page;
  if (count != 4 || !whole_number(args[2], pages) || !whole_number(args[3], page) || page < 1) return not_ours();
  c10::TensorImpl *tables = indices_of(args[0]), *lengths = indices_of(args[1]);
  if (tables == nullptr || lengths == nullptr || tables->dim() != 2 || lengths->dim() != 1 ||
      tables->size(0) != lengths->size(0) || modes_here() < 0)
    return not_ours();
  return guarded([&]() -> PyObject* {
    at::Tensor table = copy_of(tables), length = copy_of(lengths);
    const int64_t rows = table.size(0), width = table.size(1);
    const bool fits = over(length, [&](const auto* lens) {
      return over(table, [&](const auto* entries) {
        for (int64_t row = 0; row < rows; ++row) {
          if (lens[row] < 0 || int64_t(lens[row]) > width * page) return false;
          if (!distinct(entries + row * width, (int64_t(lens[row]) + page - 1) / page, pages)) return false;
        }
        return true;
      });
    });
    if (!fits) return none();
    Ref first(THPVariable_Wrap(std::move(table))), second(THPVariable_Wrap(std::move(length)));
    return first && second ? PyTuple_Pack(2, first.get(), second.get()) : nullptr;
  });
}
