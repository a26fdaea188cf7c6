// A part of hot.cpp: `BatchPlans`, the plans of one op's merged calls on one device, and how a batch of known calls runs.
//
// `run` does for a batch whose merged call is known what `BatchExecutor._outcomes`, `RowBatching.run` and
// `LocalDevice.launch_planned` do in Python, and answers NotImplemented, before it has run anything, for every other.

#pragma once

struct BatchPlans {
  PyObject_HEAD
  PyObject *device, *recover, *failed;
  std::vector<std::pair<Py_ssize_t, Py_ssize_t>>* operands;  // positions that are joined, and their axes behind the rows
  Ref* snapshot;                                             // the generation that `known` belongs to
  Table<Ref>* known;

  template <typename F>
  void each(F&& visit) {
    all_of(visit, device, recover, failed);
  }
  template <typename F>
  void inside(F&& visit) const {
    visit(snapshot->get());
    for (const auto& [key, plan] : *known) visit(plan.get());
  }
  void drop() {
    Table<Ref> old;  // what it held dies after the map is whole again
    std::swap(old, *known);
  }
  void end() {
    delete known;
    delete snapshot;
    delete operands;
  }
};

PyTypeObject* BatchPlansType = nullptr;

// Whether what is known belongs to the device's present generation; what does not is dropped.
bool present(BatchPlans* self) {
  Ref snapshot(PyObject_GetAttr(self->device, known.snapshot));
  if (!snapshot) throw PythonError();
  if (snapshot.get() == self->snapshot->get()) return true;
  self->drop();
  std::swap(snapshot, *self->snapshot);
  return false;
}

// The calls of a batch by the memory of every operand that is not joined, as lists of their places: calls of one list
// share all of it. What is no tensor, their group says. Empty where an operand is no plain tensor.
std::vector<std::vector<Py_ssize_t>> by_memory(const BatchPlans* self, PyObject* calls) {
  PyObject* first = PyList_GET_ITEM(calls, 0);
  std::vector<std::vector<Py_ssize_t>> parts(1);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(calls); ++i) parts[0].push_back(i);
  for (Py_ssize_t position = 0; position < PyTuple_GET_SIZE(first); ++position) {
    bool joined = false;
    for (const auto& [at, tail] : *self->operands) joined |= at == position;
    if (joined || !is_tensor(PyTuple_GET_ITEM(first, position))) continue;
    std::vector<std::vector<Py_ssize_t>> finer;
    for (const auto& part : parts) {
      PyObject* same = PyTuple_GET_ITEM(PyList_GET_ITEM(calls, part[0]), position);
      c10::TensorImpl* impl = plain(same);
      if (impl == nullptr) return {};
      const void* memory = impl->data();
      std::unordered_map<const void*, size_t> places{{memory, finer.size()}};
      finer.emplace_back();
      for (const Py_ssize_t i : part) {
        PyObject* other = PyTuple_GET_ITEM(PyList_GET_ITEM(calls, i), position);
        size_t place = finer.size() - 1;
        if (other != same) {
          c10::TensorImpl* theirs = plain(other);
          if (theirs == nullptr) return {};
          place = places.try_emplace(theirs->data(), finer.size()).first->second;
          if (place == finer.size()) finer.emplace_back();
        } else {
          place = places[memory];
        }
        finer[place].push_back(i);
      }
    }
    parts = std::move(finer);
  }
  return parts;
}

// The outcomes of a batch from what its launch gave; (out, counts, plan) where Python has to take the output apart.
PyObject* outcomes_of(PyObject* out, PyObject* counts, PyObject* plan) {
  const Py_ssize_t size = PyList_GET_SIZE(counts), parts = PyTuple_CheckExact(out) ? PyTuple_GET_SIZE(out) : 1;
  std::vector<Ref> split_parts;
  for (Py_ssize_t part = 0; part < parts; ++part) {
    PyObject* given[] = {PyTuple_CheckExact(out) ? PyTuple_GET_ITEM(out, part) : out, counts, Py_False};
    Ref pieces(split(nullptr, given, 3));
    if (!pieces) return nullptr;
    if (pieces.get() == Py_NotImplemented) return PyTuple_Pack(3, out, counts, plan);
    split_parts.push_back(std::move(pieces));
  }
  Ref outcomes(PyList_New(size));
  if (!outcomes) return nullptr;
  for (Py_ssize_t i = 0; i < size; ++i) {
    Ref value = Ref::to(PyTuple_CheckExact(out) ? nullptr : PyList_GET_ITEM(split_parts[0].get(), i));
    if (!value) {
      value = Ref(PyTuple_New(parts));
      if (!value) return nullptr;
      for (Py_ssize_t part = 0; part < parts; ++part)
        PyTuple_SET_ITEM(value.get(), part, Ref::to(PyList_GET_ITEM(split_parts[part].get(), i)).release());
    }
    PyObject* pair = PyTuple_Pack(2, value.get(), plan);
    if (pair == nullptr) return nullptr;
    PyList_SET_ITEM(outcomes.get(), i, pair);
  }
  return outcomes.release();
}

// Calls of a batch that share their weights, as the one call that they become, and its plan.
struct MergedCall {
  Ref held[MAX_PARAMETERS], counts, plan;
  PyObject* values[MAX_PARAMETERS];
  Py_ssize_t size = 0;
};

// Whether the calls of `list` become a known call; nothing has run. Throws: PythonError.
bool merged(const BatchPlans* self, PyObject* list, int mask, MergedCall& into) {
  PyObject* first = PyList_GET_ITEM(list, 0);
  into.size = PyTuple_GET_SIZE(first);
  into.counts = Ref(PyList_New(PyList_GET_SIZE(list)));
  if (!into.counts) throw PythonError();
  for (Py_ssize_t i = 0; i < into.size; ++i) into.values[i] = PyTuple_GET_ITEM(first, i);
  bool counted = false;
  for (const auto& [position, tail] : *self->operands) {
    if (position >= into.size) return false;
    if (into.values[position] == Py_None) {
      if (!counted) return false;
      continue;
    }
    Ref joined(gathered(list, position, tail, counted ? nullptr : into.counts.get()));
    if (!joined) throw PythonError();
    if (joined.get() == Py_NotImplemented) return false;
    into.values[position] = joined.get();
    into.held[position] = std::move(joined);
    counted = true;
  }
  Key key;
  if (!counted || !plan_key(mask, into.values, into.size, key, HOST)) return false;
  const auto found = self->known->find(key.view());
  if (found == self->known->end()) return false;
  into.plan = Ref::to(found->second.get());  // of our own: the kernel may run code that forgets the entry
  return true;
}

// Its outcomes, as `outcomes_of`.
PyObject* ran(BatchPlans* self, PyObject* device, MergedCall& call) {
  Ref function(PyObject_GetAttr(call.plan.get(), known.call));
  if (!function) return nullptr;
  Ref out(PyObject_Vectorcall(function.get(), call.values, size_t(call.size), nullptr));
  if (out) return outcomes_of(out.get(), call.counts.get(), call.plan.get());
  Ref next = recovered_pair(self->recover, device, call.plan.get(), call.values, call.size);
  if (!next) return nullptr;
  return outcomes_of(PyTuple_GET_ITEM(next.get(), 0), call.counts.get(), PyTuple_GET_ITEM(next.get(), 1));
}

#include "products.h"

// The outcomes of a batch of several weights: a call for each, all known before the first of them runs.
PyObject* ran_in_parts(BatchPlans* self, PyObject* device, PyObject* calls, int mask,
                       const std::vector<std::vector<Py_ssize_t>>& parts) {
  std::vector<MergedCall> merged_calls(parts.size());
  for (size_t at = 0; at < parts.size(); ++at) {
    Ref list(PyList_New(Py_ssize_t(parts[at].size())));
    if (!list) return nullptr;
    for (size_t i = 0; i < parts[at].size(); ++i)
      PyList_SET_ITEM(list.get(), Py_ssize_t(i), Ref::to(PyList_GET_ITEM(calls, parts[at][i])).release());
    if (!merged(self, list.get(), mask, merged_calls[at])) return not_ours();
  }
  Ref outcomes(PyList_New(PyList_GET_SIZE(calls)));
  if (!outcomes) return nullptr;
  for (size_t at = 0; at < parts.size(); ++at) {
    Ref own(ran(self, device, merged_calls[at]));
    if (!own) return nullptr;
    if (!PyList_CheckExact(own.get())) return not_ours();  // Python runs all of it again, and takes it apart
    for (size_t i = 0; i < parts[at].size(); ++i)
      PyList_SET_ITEM(outcomes.get(), parts[at][i], Ref::to(PyList_GET_ITEM(own.get(), Py_ssize_t(i))).release());
  }
  return outcomes.release();
}

PyObject* run_batch(BatchPlans* self, PyObject* calls, int mask) {
  if (self->known->empty() || forward_level() || !present(self)) return not_ours();
  PyObject* first = PyList_GET_ITEM(calls, 0);
  if (!PyTuple_CheckExact(first) || PyTuple_GET_SIZE(first) > MAX_PARAMETERS) return not_ours();
  const Py_ssize_t count = PyTuple_GET_SIZE(first);
  for (Py_ssize_t i = 1; i < PyList_GET_SIZE(calls); ++i) {
    PyObject* call = PyList_GET_ITEM(calls, i);
    if (!PyTuple_CheckExact(call) || PyTuple_GET_SIZE(call) != count) return not_ours();
  }
  // The modes of the batch: those in force, or inference mode alone in addition.
  const int here = modes_here();
  std::unique_ptr<c10::InferenceMode> inference;
  if (here < 0) return not_ours();
  if (here != mask) {
    if (mask != ((here | INFERENCE) & ~GRAD) || here & INFERENCE) return not_ours();
    inference = std::make_unique<c10::InferenceMode>(true);
  }
  const auto parts = by_memory(self, calls);
  Ref device = Ref::to(self->device);
  if (parts.empty()) return not_ours();
  if (parts.size() > 1) {
    PyObject* outcomes = ran_as_products(self, calls, mask, parts);
    return outcomes != nullptr ? outcomes : ran_in_parts(self, device.get(), calls, mask, parts);
  }
  MergedCall call;
  return merged(self, calls, mask, call) ? ran(self, device.get(), call) : not_ours();
}

// run(calls, mask): the outcomes of a batch under plain modes, (out, counts, plan) where its output is nothing that
// `split` knows, or NotImplemented where nothing has run.
PyObject* batches_run(BatchPlans* self, PyObject* const* given, Py_ssize_t count) {
  if (count != 2 || !PyList_CheckExact(given[0]) || PyList_GET_SIZE(given[0]) < 2) return not_ours();
  const long mask = PyLong_AsLong(given[1]);
  if (mask < 0) return PyErr_Occurred() ? nullptr : not_ours();
  return guarded([&] { return run_batch(self, given[0], int(mask)); });
}

// remember(args, snapshot, plan): whether `run` will know a batch that becomes this call under the modes in force.
PyObject* batches_remember(BatchPlans* self, PyObject* const* given, Py_ssize_t count) {
  if (count != 3 || !PyTuple_CheckExact(given[0]) || PyTuple_GET_SIZE(given[0]) > MAX_PARAMETERS) Py_RETURN_FALSE;
  return guarded([&]() -> PyObject* {
    Key key;
    const int here = modes_here();
    PyObject* values[MAX_PARAMETERS];
    const Py_ssize_t size = PyTuple_GET_SIZE(given[0]);
    for (Py_ssize_t i = 0; i < size; ++i) values[i] = PyTuple_GET_ITEM(given[0], i);
    if (here < 0 || forward_level() || !plan_key(here, values, size, key, HOST)) Py_RETURN_FALSE;
    present(self);
    if (given[1] != self->snapshot->get()) Py_RETURN_FALSE;
    if (self->known->size() >= MAX_ENTRIES) self->drop();
    remember(*self->known, key, Ref::to(given[2]));
    Py_RETURN_TRUE;
  });
}

// BatchPlans(device, recover, ((position, axes behind the rows), ...), failed): `failed(plan, error)` is told of a kernel whose
// function for several weights raised.
PyObject* batches_new(PyTypeObject* type, PyObject* given, PyObject*) {
  PyObject *device, *recover, *operands, *failed;
  if (!PyArg_ParseTuple(given, "OOO!O", &device, &recover, &PyTuple_Type, &operands, &failed)) return nullptr;
  std::vector<std::pair<Py_ssize_t, Py_ssize_t>> joined;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(operands); ++i) {
    Py_ssize_t position, tail;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(operands, i), "nn", &position, &tail)) return nullptr;
    if (position < 0 || position >= MAX_PARAMETERS || tail < 0) {
      PyErr_Format(PyExc_ValueError, "operands need positions from 0 to %zd, got %zd", MAX_PARAMETERS - 1, position);
      return nullptr;
    }
    joined.emplace_back(position, tail);
  }
  auto* self = made<BatchPlans>(type, {device, recover, failed});
  if (self == nullptr) return nullptr;
  self->operands = new std::vector<std::pair<Py_ssize_t, Py_ssize_t>>(std::move(joined));
  self->snapshot = new Ref();
  self->known = new Table<Ref>();
  PyObject_GC_Track(self);
  return reinterpret_cast<PyObject*>(self);
}

PyObject* batches_size(BatchPlans* self, void*) { return PyLong_FromSize_t(self->known->size()); }

PyMethodDef batches_methods[] = {
    method("run", batches_run, METH_FASTCALL, "The outcomes of a known batch, or NotImplemented."),
    method("remember", batches_remember, METH_FASTCALL, "Whether `run` will know such a batch."),
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef batches_getset[] = {
    {"size", reinterpret_cast<getter>(batches_size), nullptr, "Merged calls it knows.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject* batches_class() {
  return class_of<BatchPlans>(
      "layerzero.native.BatchPlans", "The plans of one op's merged calls on one device.",
      {slot(Py_tp_new, batches_new), slot(Py_tp_methods, batches_methods), slot(Py_tp_getset, batches_getset)});
}
