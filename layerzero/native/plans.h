// A part of hot.cpp: `Plans`, the plans of one op's blocking calls, under a key made of all that can change the choice.
//
// `run` does for a call that is known what `layerzero.calls.blocking.blocking` does in Python, and answers NotImplemented
// for every other call. The alignment of each tensor is part of the key: capabilities may depend on it.

#pragma once

struct RunnablePlan {
  Ref plan, constants;  // constants: values by position, Ellipsis where the call's own tensor stands
};

// What is known for one device; valid while its runtime and its generation are in force.
struct DevicePlans {
  Ref devices, device, snapshot;
  Table<RunnablePlan> entries;
};

struct Plans {
  PyObject_HEAD
  PyObject *names, *defaults, *active, *scope, *rehearsal;
  PyObject *last, *recover;  // what notes a thread's last plan, and what goes on after an error
  Py_ssize_t positional;
  unsigned long long hits;  // calls it has run
  std::unordered_map<int, DevicePlans>* by_place;

  template <typename F>
  void each(F&& visit) {
    all_of(visit, names, defaults, active, scope, rehearsal, last, recover);
  }
  template <typename F>
  void inside(F&& visit) const {
    for (const auto& [place, here] : *by_place) {
      for (const Ref* ref : {&here.devices, &here.device, &here.snapshot}) visit(ref->get());
      for (const auto& [key, entry] : here.entries)
        for (const Ref* ref : {&entry.plan, &entry.constants}) visit(ref->get());
    }
  }
  void drop() {
    std::unordered_map<int, DevicePlans> old;
    std::swap(old, *by_place);
  }
  void end() { delete by_place; }
};

PyTypeObject* PlansType = nullptr;

// The key of a call's values, null where a default stands; false where one has none, or lies elsewhere than `only`.
bool plan_key(int modes, PyObject* const* values, Py_ssize_t count, Key& key, int only = ELSEWHERE) {
  uint64_t alignments = 1;
  key.add(uint64_t(modes));
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (values[i] == nullptr ? !key.add(0) : !add_value(key, values[i], false)) return false;
    c10::TensorImpl* impl = values[i] == nullptr ? nullptr : plain(values[i]);
    if (impl == nullptr) continue;
    if ((only != ELSEWHERE && place_of(impl) != only) || alignments >> 60) return false;  // more tensors than any op has
    alignments = alignments << 3 | uint64_t(std::countr_zero(reinterpret_cast<uint64_t>(impl->data()) | 64));
  }
  return key.add(alignments);
}

// Where a call's first tensor lies; ELSEWHERE where its first argument is no plain tensor.
int place_of_call(PyObject* const* values) {
  const c10::TensorImpl* first = values[0] == nullptr ? nullptr : plain(values[0]);
  return first == nullptr ? ELSEWHERE : place_of(first);
}

void forget_place(Plans* self, int place) {
  const auto node = self->by_place->extract(place);  // what it held dies after the map is whole again
}

// What holds at `place` now; null where nothing is known or the runtime or the device's generation has changed.
DevicePlans* plans_at(Plans* self, int place) {
  const auto at = self->by_place->find(place);
  if (at == self->by_place->end()) return nullptr;
  Ref devices(PyObject_GetAttr(self->active, known.devices));
  Ref snapshot(PyObject_GetAttr(at->second.device.get(), known.snapshot));
  PyErr_Clear();
  if (devices.get() == at->second.devices.get() && snapshot.get() == at->second.snapshot.get()) return &at->second;
  forget_place(self, place);
  return nullptr;
}

// The error that is set goes to Python's `recover`, which runs the next kernel or raises.
PyObject* recovered(PyObject* recover, PyObject* device, PyObject* plan, PyObject* const* values, Py_ssize_t count) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  Ref kind(type), error(value), where(trace), full(PyTuple_New(count));
  if (!full) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(full.get(), i, Ref::to(values[i]).release());
  PyObject* pass[] = {device, plan, full.get(), error.get(), Py_None};
  // As inside an `except`: what is raised from here on has the error as its context.
  PyObject* before = PyErr_GetHandledException();
  PyErr_SetHandledException(error.get());
  PyObject* result = PyObject_Vectorcall(recover, pass, 5, nullptr);
  PyErr_SetHandledException(before);
  Py_XDECREF(before);
  return result;
}

// The same where `recover` returns a result and the plan of it: the pair, or nothing and an error.
Ref recovered_pair(PyObject* recover, PyObject* device, PyObject* plan, PyObject* const* values, Py_ssize_t count) {
  Ref pair(recovered(recover, device, plan, values, count));
  if (!pair || (PyTuple_CheckExact(pair.get()) && PyTuple_GET_SIZE(pair.get()) == 2)) return pair;
  PyErr_SetString(PyExc_TypeError, "recover needs to return a result and a plan");
  return Ref();
}

// Those of a call that may be known; negative where none is.
int modes_of_known(const Plans* self) { return self->by_place->empty() ? -1 : modes_of_call(self); }

// The result of a call whose values are bound, under modes of `modes_of_known`; NotImplemented where it is not known.
PyObject* run_bound(Plans* self, int modes, PyObject** values) {
  const int place = place_of_call(values);
  DevicePlans* here = place == ELSEWHERE ? nullptr : plans_at(self, place);
  if (here == nullptr) return not_ours();
  Key key;
  const Py_ssize_t count = PyTuple_GET_SIZE(self->names);
  if (!plan_key(modes | switches_here(), values, count, key)) return not_ours();
  const auto found = here->entries.find(key.view());
  if (found == here->entries.end()) return not_ours();
  // References of our own: the kernel may run code that forgets the entry.
  Ref plan = Ref::to(found->second.plan.get()), constants = Ref::to(found->second.constants.get());
  Ref device = Ref::to(here->device.get());
  if (!usual(self, place)) return not_ours();
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* constant = PyTuple_GET_ITEM(constants.get(), i);
    if (constant != Py_Ellipsis) values[i] = constant;
  }
  ++self->hits;
  if (PyObject_SetAttr(self->last, known.plan, plan.get())) return nullptr;
  Ref call(PyObject_GetAttr(plan.get(), known.call));
  if (!call) return nullptr;
  PyObject* result = PyObject_Vectorcall(call.get(), values, size_t(count), nullptr);
  if (result != nullptr) return result;
  return recovered(self->recover, device.get(), plan.get(), values, count);
}

PyObject* run_known(Plans* self, PyObject* args, PyObject* kwargs) {
  const int modes = modes_of_known(self);
  if (modes < 0) return PyErr_Occurred() ? nullptr : not_ours();
  PyObject* values[MAX_PARAMETERS];
  return bind(self, args, kwargs, values) ? run_bound(self, modes, values) : not_ours();
}

// run(args, kwargs): the result of a known call, whose plan is noted; NotImplemented for any other.
PyObject* plans_run(Plans* self, PyObject* const* given, Py_ssize_t count) {
  if (count != 2 || !PyTuple_CheckExact(given[0]) || !PyDict_CheckExact(given[1])) return not_ours();
  return guarded([&] { return run_known(self, given[0], given[1]); });
}

// remember(args, kwargs, full, devices, device, snapshot, plan): whether `run` will know such a call.
PyObject* plans_remember(Plans* self, PyObject* given) {
  PyObject *args, *kwargs, *full, *devices, *device, *snapshot, *plan;
  if (!PyArg_ParseTuple(given, "O!O!O!OOOO", &PyTuple_Type, &args, &PyDict_Type, &kwargs, &PyTuple_Type, &full,
                        &devices, &device, &snapshot, &plan))
    return nullptr;
  const int here = modes_here();
  const Py_ssize_t all = PyTuple_GET_SIZE(self->names);
  PyObject* values[MAX_PARAMETERS];
  if (here < 0 || forward_level() || PyTuple_GET_SIZE(full) != all || !bind(self, args, kwargs, values)) Py_RETURN_FALSE;
  const int place = place_of_call(values);
  if (place == ELSEWHERE || !usual(self, place)) Py_RETURN_FALSE;
  Ref constants(constants_of(full, values));
  if (!constants) return nullptr;
  if (constants.get() == Py_None) Py_RETURN_FALSE;
  return guarded([&]() -> PyObject* {
    Key key;
    if (!plan_key(here | switches_here(), values, all, key)) Py_RETURN_FALSE;
    DevicePlans* known_here = plans_at(self, place);
    if (known_here != nullptr && (device != known_here->device.get() || devices != known_here->devices.get() ||
                                  snapshot != known_here->snapshot.get() || known_here->entries.size() >= MAX_ENTRIES)) {
      forget_place(self, place);
      known_here = nullptr;
    }
    if (known_here == nullptr) {
      known_here = &(*self->by_place)[place];
      known_here->devices = Ref::to(devices);
      known_here->device = Ref::to(device);
      known_here->snapshot = Ref::to(snapshot);
    }
    remember(known_here->entries, key, RunnablePlan{Ref::to(plan), std::move(constants)});
    Py_RETURN_TRUE;
  });
}

PyObject* plans_forget(Plans* self, PyObject*) {
  self->drop();
  return none();
}

PyObject* plans_new(PyTypeObject* type, PyObject* given, PyObject*) {
  PyObject *names, *defaults, *active, *scope, *rehearsal, *last, *recover;
  Py_ssize_t positional;
  if (!PyArg_ParseTuple(given, "O!O!nOOOOO", &PyTuple_Type, &names, &PyTuple_Type, &defaults, &positional, &active,
                        &scope, &rehearsal, &last, &recover))
    return nullptr;
  Ref own(interned(names, defaults));
  if (!own) return nullptr;
  auto* self = made<Plans>(type, {own.get(), defaults, active, scope, rehearsal, last, recover});
  if (self == nullptr) return nullptr;
  self->positional = positional;
  self->hits = 0;
  self->by_place = new std::unordered_map<int, DevicePlans>();
  PyObject_GC_Track(self);
  return reinterpret_cast<PyObject*>(self);
}

PyObject* plans_size(Plans* self, void*) {
  size_t size = 0;
  for (const auto& [place, here] : *self->by_place) size += here.entries.size();
  return PyLong_FromSize_t(size);
}

PyMethodDef plans_methods[] = {
    method("run", plans_run, METH_FASTCALL, "The result of a known call, or NotImplemented."),
    method("remember", plans_remember, METH_VARARGS, "Whether `run` will know such a call."),
    method("forget", plans_forget, METH_NOARGS, "Drop everything."),
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef plans_getset[] = {{"size", reinterpret_cast<getter>(plans_size), nullptr, "Calls it knows.", nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMemberDef plans_members[] = {
    {"hits", T_ULONGLONG, offsetof(Plans, hits), READONLY, "How often it was asked for one it knew."}, {nullptr, 0, 0, 0, nullptr}};

PyTypeObject* plans_class() {
  return class_of<Plans>("layerzero.native.PlanCache", "The plans of one op's blocking calls.",
                         {slot(Py_tp_new, plans_new), slot(Py_tp_methods, plans_methods), slot(Py_tp_getset, plans_getset),
                          slot(Py_tp_members, plans_members)});
}
