// A part of hot.cpp: how a batch of calls with several weights runs as one launch, where each weight is one of a product.

#pragma once

// Rows times transposed matrices, each its own: `rows` (N, K) in parts of so many, one behind another, by (C, K) each.
// One pass without the interpreter's lock, each product with torch's threads: threads of this file's own would be others
// than those that torch's products take, and both would fill every core.
at::Tensor products(const at::Tensor& rows, const std::vector<int64_t>& parts, const std::vector<c10::TensorImpl*>& weights) {
  const int64_t height = weights[0]->size(0), width = weights[0]->size(1);
  std::vector<int64_t> starts{0};
  for (const int64_t count : parts) starts.push_back(starts.back() + count);
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor out = at::empty({rows.size(0), height}, rows.options().requires_grad(false));
  const Unlocked unlocked;
  for (size_t at = 0; at < parts.size(); ++at) {
    c10::TensorImpl* weight = weights[at];
    at::Tensor into = view_of(out.unsafeGetTensorImpl(), {parts[at], height}, {height, 1}, starts[at] * height);
    const at::Tensor left = view_of(rows.unsafeGetTensorImpl(), {parts[at], width}, {width, 1},
                                    rows.storage_offset() + starts[at] * width);
    const at::Tensor right =
        view_of(weight, {width, height}, {weight->stride(1), weight->stride(0)}, weight->storage_offset());
    at::mm_out(into, left, right);
  }
  return out;
}

// How the products of a plan's kernel run in groups (`layerzero.native.is_product`): True by torch's, else by that function;
// empty where its kernel is no product alone of its rows and its weight.
Ref grouped_by(PyObject* plan) {
  Ref call(PyObject_GetAttr(plan, known.call));
  Ref says(call ? PyObject_GetAttrString(call.get(), "is_product") : nullptr);
  if (!says) PyErr_Clear();
  return says;
}

// The products by the own function of a plan's kernel; empty where it has none for these, or fails, which `failed` is told.
Ref products_of(PyObject* function, PyObject* rows, const std::vector<int64_t>& parts, PyObject* weights, PyObject* failed,
                PyObject* plan) {
  Ref counts(PyList_New(0));
  for (const int64_t part : parts) {
    Ref count(PyLong_FromLongLong(part));
    if (!counts || !count || PyList_Append(counts.get(), count.get())) throw PythonError();
  }
  Ref out(PyObject_CallFunctionObjArgs(function, rows, counts.get(), weights, nullptr));
  if (!out) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw PythonError();
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    Ref kind(type), error(value), where(trace);
    if (!Ref(PyObject_CallFunctionObjArgs(failed, plan, error.get(), nullptr))) throw PythonError();
  }
  return out && is_tensor(out.get()) ? std::move(out) : Ref();
}

// The outcomes of a batch of several weights by one launch: rows are put together once, in the order of their weights.
// Nothing (no error is set) where it is no batch of plain products of one shape that are all known, or one fails: then
// each part is launched by itself, and has its own way to go on.
PyObject* ran_as_products(BatchPlans* self, PyObject* calls, int mask, const std::vector<std::vector<Py_ssize_t>>& parts) {
  PyObject* first = PyList_GET_ITEM(calls, 0);
  const Py_ssize_t size = PyTuple_GET_SIZE(first);
  if (self->operands->size() != 1 || self->operands->front() != std::pair<Py_ssize_t, Py_ssize_t>{0, 1} || size < 2)
    return nullptr;
  for (Py_ssize_t i = 2; i < size; ++i)
    if (PyTuple_GET_ITEM(first, i) != Py_None) return nullptr;
  std::vector<c10::TensorImpl*> weights;
  Ref ordered(PyList_New(0)), owners(PyList_New(0));
  for (const auto& part : parts) {
    PyObject* call = PyList_GET_ITEM(calls, part[0]);
    c10::TensorImpl* weight = plain(PyTuple_GET_ITEM(call, 1));
    if (weight == nullptr || weight->dim() != 2 || weight->numel() == 0 || needs_graph(weight) ||
        (!weights.empty() && (weight->sizes() != weights[0]->sizes() || weight->dtype() != weights[0]->dtype())))
      return nullptr;
    weights.push_back(weight);
    if (!owners || PyList_Append(owners.get(), PyTuple_GET_ITEM(call, 1))) throw PythonError();
    for (const Py_ssize_t i : part)
      if (!ordered || PyList_Append(ordered.get(), PyList_GET_ITEM(calls, i))) throw PythonError();
  }
  Ref counts(PyList_New(PyList_GET_SIZE(ordered.get())));
  Ref joined(counts ? gathered(ordered.get(), 0, 1, counts.get()) : nullptr);
  if (!joined) throw PythonError();
  c10::TensorImpl* rows = plain(joined.get());
  if (rows == nullptr || !rows->is_contiguous() || rows->dtype() != weights[0]->dtype() || rows->numel() == 0 ||
      rows->size(1) != weights[0]->size(1) || place_of(rows) != HOST)
    return nullptr;
  std::vector<Ref> plans;
  Ref grouped;
  std::vector<int64_t> taken;
  PyObject* values[MAX_PARAMETERS];
  int64_t start = 0;
  Py_ssize_t at = 0;
  for (const auto& part : parts) {
    int64_t own = 0;
    for (size_t i = 0; i < part.size(); ++i) own += PyLong_AsLongLong(PyList_GET_ITEM(counts.get(), at++));
    PyObject* call = PyList_GET_ITEM(calls, part[0]);
    Ref piece = Ref::to(PyTuple_GET_ITEM(call, 0));  // by itself a call is known as it came
    if (part.size() > 1) {
      const int64_t width = rows->size(1);
      piece = Ref(THPVariable_Wrap(view_of(rows, {own, width}, {width, 1}, rows->storage_offset() + start * width)));
    }
    if (!piece) throw PythonError();
    for (Py_ssize_t i = 0; i < size; ++i) values[i] = i == 0 ? piece.get() : PyTuple_GET_ITEM(call, i);
    Key key;
    if (!plan_key(mask, values, size, key, HOST)) return nullptr;
    const auto found = self->known->find(key.view());
    if (found == self->known->end()) return nullptr;
    plans.push_back(Ref::to(found->second.get()));
    Ref by = grouped_by(plans.back().get());
    if (!by || (grouped && by.get() != grouped.get())) return nullptr;
    grouped = std::move(by);
    taken.push_back(own);
    start += own;
  }
  Ref whole;
  if (grouped.get() != Py_True) {
    whole = products_of(grouped.get(), joined.get(), taken, owners.get(), self->failed, plans.front().get());
    if (!whole) return nullptr;
  } else {
    try {
      whole = Ref(THPVariable_Wrap(products(THPVariable_Unpack(joined.get()), taken, weights)));
    } catch (const std::exception&) {
      return nullptr;
    }
  }
  PyObject* given[] = {whole.get(), counts.get(), Py_False};
  Ref pieces(whole ? split(nullptr, given, 3) : nullptr);
  Ref outcomes(pieces ? PyList_New(PyList_GET_SIZE(calls)) : nullptr);
  if (!outcomes) throw PythonError();
  if (pieces.get() == Py_NotImplemented) return nullptr;
  at = 0;
  for (size_t number = 0; number < parts.size(); ++number)
    for (const Py_ssize_t i : parts[number]) {
      PyObject* pair = PyTuple_Pack(2, PyList_GET_ITEM(pieces.get(), at++), plans[number].get());
      if (pair == nullptr) throw PythonError();
      PyList_SET_ITEM(outcomes.get(), i, pair);
    }
  return outcomes.release();
}
