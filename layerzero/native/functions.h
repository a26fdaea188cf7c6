// A part of hot.cpp: `Kinds`, which knows the calls of one batched function by their kind, and how the rows of a
// batch of them are put together and taken apart. What awaits such a call is `Call` (calls.h).

#pragma once

// A kind of call. `types` are the classes whose addresses stand in the key: they may not die before it.
struct Kind {
  Ref group, modes, types;
};

enum Home { DEVICES, DEVICE, FRONTS, HOMES };

struct Kinds : Awaited {
  Ref* home;        // devices, device, fronts
  Loop* last_loop;  // the loop that asked last
  Table<Kind>* known;

  template <typename F>
  void each(F&& visit) {
    all_of(visit, subject, active, scope, last, restore, follow);
  }
  template <typename F>
  void inside(F&& visit) const {
    for (int i = 0; i < HOMES; ++i) visit(home[i].get());
    visit(last_loop->loop.get());
    for (const auto& [key, kind] : *known)
      for (const Ref* ref : {&kind.group, &kind.modes, &kind.types}) visit(ref->get());
  }
  void forget() {
    // What they held dies after both are empty.
    Table<Kind> old;
    Ref places[HOMES], loop;
    std::swap(old, *known);
    for (int i = 0; i < HOMES; ++i) std::swap(places[i], home[i]);
    std::swap(loop, last_loop->loop);
  }
  void drop() {
    forget();
    Py_CLEAR(subject);
    Py_CLEAR(follow);
  }
  void end() {
    delete known;
    delete[] home;
    delete last_loop;
  }
};

PyTypeObject* KindsType = nullptr;

// The rows and bytes of one call's tensors, where they lie and the key of its kind, as `describe_rows` finds them;
// false where Python has to look: subclasses, tensors without rows or with different numbers of them, tensors of
// several devices, a stream of the caller's own, what needs a gradient. A call without tensors is one row of the
// host's; of a function on another device Python remembers none.
bool see(PyObject* args, int modes, Key& key, long long& rows, long long& bytes, int& place) {
  rows = -1;
  bytes = 0;
  place = ELSEWHERE;
  key.add(uint64_t(modes));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    PyObject* value = PyTuple_GET_ITEM(args, i);
    c10::TensorImpl* impl = plain(value);
    if (impl == nullptr) {
      if (is_tensor(value) || !key.add(2) || !key.add(reinterpret_cast<uint64_t>(Py_TYPE(value)))) return false;
      continue;
    }
    const auto sizes = impl->sizes();
    const int here = place_of(impl);
    if (sizes.empty() || here == ELSEWHERE || (rows >= 0 && (rows != sizes[0] || place != here)) ||
        ((modes & GRAD) && impl->requires_grad()) || key.size + 3 + sizes.size() > MAX_KEY / 8)
      return false;
    rows = sizes[0];
    place = here;
    bytes += impl->numel() * (long long)impl->itemsize();
    key.add(1 | uint64_t(sizes.size()) << 16 | uint64_t(uint16_t(impl->dtype().toScalarType())) << 32 |
            uint64_t(uint8_t(here)) << 48);
    key.add(impl->key_set().raw_repr());
    key.add(reinterpret_cast<uint64_t>(Py_TYPE(value)));
    for (const int64_t extent : sizes.slice(1)) key.add(uint64_t(extent));
  }
  if (rows == 0 && !key.add(0)) return false;  // as `describe_rows` sets these apart
  if (rows < 0) {
    rows = 1;
    place = HOST;
  }
  return on_default_stream(place);
}

// Where a call made here would wait: the front of the running loop, empty where nothing is known of it or a scope
// or unusual modes are in force; those modes go into `modes`. An error is set or not.
Ref front_here(Kinds* self, int& modes) {
  if (self->known->empty()) return Ref();
  modes = modes_of_call(self);
  if (modes < 0 || hooked(modes)) return Ref();
  Ref devices(PyObject_GetAttr(self->active, known.devices));
  if (!devices) return Ref();
  if (devices.get() != self->home[DEVICES].get()) {
    self->forget();
    return Ref();
  }
  Ref loop = loop_here(*self->last_loop);
  if (!loop) return Ref();
  return Ref::to(PyDict_GetItemWithError(self->home[FRONTS].get(), loop.get()));
}

// The ticket of a call whose kind is known; empty for any other. An error is set or not.
Ref ticket_of(Kinds* self, PyObject* args, int modes, Ref front, double us_per_row) {
  Key key;
  long long rows, bytes;
  int place;
  if (!see(args, modes, key, rows, bytes, place)) return Ref();
  const auto found = self->known->find(key.view());
  if (found == self->known->end()) return Ref();
  Ref group = Ref::to(found->second.group.get()), around = Ref::to(found->second.modes.get());
  Ref device = Ref::to(self->home[DEVICE].get());
  Ticket* ticket = blank_ticket();
  if (ticket == nullptr) return Ref();
  ticket->op = Ref::to(self->subject).release();
  ticket->args = Ref::to(args).release();
  ticket->group = group.release();
  ticket->modes = around.release();
  ticket->device = device.release();
  ticket->front = front.release();
  ticket->expected_us = us_per_row * double(rows);
  ticket->tokens = rows;
  ticket->bytes = bytes;
  ticket->surroundings = modes;
  ticket->place = place;
  PyObject_GC_Track(ticket);
  return Ref(reinterpret_cast<PyObject*>(ticket));
}

// The mean time of a row, which the function measures at each run; negative with an error set.
double us_per_row_of(Kinds* self) {
  Ref us(PyObject_GetAttr(self->subject, known.us_per_row));
  return us ? PyFloat_AsDouble(us.get()) : -1.0;
}

// The ticket of a call whose kind is known, its front in it; empty for any other. An error is set or not.
Ref found(Kinds* self, PyObject* args) {
  int modes = -1;
  Ref front = front_here(self, modes);
  if (!front) return Ref();
  const double us_per_row = us_per_row_of(self);
  return PyErr_Occurred() ? Ref() : ticket_of(self, args, modes, std::move(front), us_per_row);
}

// find(args, keywords): that ticket, or None.
PyObject* kinds_find(Kinds* self, PyObject* const* given, Py_ssize_t count) {
  if (count != 2 || !PyTuple_CheckExact(given[0]) || !PyDict_CheckExact(given[1]) || PyDict_GET_SIZE(given[1])) return none();
  return guarded([&]() -> PyObject* {
    Ref ticket = found(self, given[0]);
    if (!ticket) return PyErr_Occurred() ? nullptr : none();
    return ticket.release();
  });
}

// remember(args, (devices, device, fronts), group, modes): whether `find` will know calls of this kind.
PyObject* kinds_remember(Kinds* self, PyObject* given) {
  PyObject *args, *home[HOMES], *group, *modes;
  if (!PyArg_ParseTuple(given, "O!(OOO!)OO", &PyTuple_Type, &args, &home[DEVICES], &home[DEVICE], &PyDict_Type,
                        &home[FRONTS], &group, &modes))
    return nullptr;
  return guarded([&]() -> PyObject* {
    Key key;
    long long rows, bytes;
    int place;
    const int here = modes_here();
    if (here < 0 || !see(args, here, key, rows, bytes, place)) Py_RETURN_FALSE;
    bool same = self->known->size() < MAX_ENTRIES;
    for (int i = 0; i < HOMES; ++i) same = same && self->home[i].get() == home[i];
    if (!same) {
      self->forget();
      for (int i = 0; i < HOMES; ++i) self->home[i] = Ref::to(home[i]);
    }
    Ref types(PyTuple_New(PyTuple_GET_SIZE(args)));
    if (!types) return nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
      auto* type = reinterpret_cast<PyObject*>(Py_TYPE(PyTuple_GET_ITEM(args, i)));
      PyTuple_SET_ITEM(types.get(), i, Ref::to(type).release());
    }
    remember(*self->known, key, Kind{Ref::to(group), Ref::to(modes), std::move(types)});
    Py_RETURN_TRUE;
  });
}

PyObject* kinds_forget(Kinds* self, PyObject*) {
  self->forget();
  return none();
}

PyObject* kinds_new(PyTypeObject* type, PyObject* given, PyObject*) {
  PyObject *function, *active, *scope, *last, *restore, *follow;
  if (!PyArg_ParseTuple(given, "OOOOOO", &function, &active, &scope, &last, &restore, &follow)) return nullptr;
  auto* self = made<Kinds>(type, {function, active, scope, last, restore, follow});
  if (self == nullptr) return nullptr;
  self->home = new Ref[HOMES];
  self->last_loop = new Loop();
  self->known = new Table<Kind>();
  PyObject_GC_Track(self);
  return reinterpret_cast<PyObject*>(self);
}

PyObject* kinds_call(Kinds* self, PyObject* args);

PyMethodDef kinds_methods[] = {
    method("call", kinds_call, METH_O, "What awaits the function with these arguments."),
    method("find", kinds_find, METH_FASTCALL, "The ticket of a call of a known kind, or None."),
    method("remember", kinds_remember, METH_VARARGS, "Whether `find` will know such calls."),
    method("forget", kinds_forget, METH_NOARGS, "Drop everything."),
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject* kinds_class() {
  return class_of<Kinds>("layerzero.native.FunctionCache", "What is known about the calls of one batched function.",
                         {slot(Py_tp_new, kinds_new), slot(Py_tp_methods, kinds_methods)});
}

// Rows of one call: what its first tensor has along its first axis, one without a tensor; -1 for Python to look.
long long rows_of(PyObject* call) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(call); ++i) {
    PyObject* value = PyTuple_GET_ITEM(call, i);
    if (!is_tensor(value)) continue;
    c10::TensorImpl* impl = plain(value);
    return impl == nullptr || impl->dim() == 0 ? -1 : impl->size(0);
  }
  return 1;
}

// columns(calls): (rows of each call, the calls' arguments turned into columns: everybody's rows in one tensor,
// everything else a list), or NotImplemented where Python has to look.
PyObject* columns(PyObject*, PyObject* calls) {
  if (!PyList_CheckExact(calls) || PyList_GET_SIZE(calls) == 0) return not_ours();
  const Py_ssize_t size = PyList_GET_SIZE(calls);
  PyObject* head = PyList_GET_ITEM(calls, 0);
  if (!PyTuple_CheckExact(head)) return not_ours();
  const Py_ssize_t width = PyTuple_GET_SIZE(head);
  Ref counts(PyList_New(size)), made(PyTuple_New(width));
  if (!counts || !made) return nullptr;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* call = PyList_GET_ITEM(calls, i);
    if (!PyTuple_CheckExact(call) || PyTuple_GET_SIZE(call) != width) return not_ours();
    const long long rows = rows_of(call);
    if (rows < 0) return not_ours();
    PyObject* told = PyLong_FromLongLong(rows);
    if (told == nullptr) return nullptr;
    PyList_SET_ITEM(counts.get(), i, told);
  }
  for (Py_ssize_t column = 0; column < width; ++column) {
    PyObject* first = PyTuple_GET_ITEM(head, column);
    PyObject* whole = nullptr;
    if (!is_tensor(first)) {
      whole = PyList_New(size);
      for (Py_ssize_t i = 0; whole != nullptr && i < size; ++i)
        PyList_SET_ITEM(whole, i, Ref::to(PyTuple_GET_ITEM(PyList_GET_ITEM(calls, i), column)).release());
    } else if (size == 1) {
      whole = Ref::to(first).release();
    } else {
      c10::TensorImpl* impl = plain(first);
      if (impl == nullptr || impl->dim() == 0) return not_ours();
      whole = gathered(calls, column, impl->dim() - 1, nullptr);
    }
    if (whole == nullptr) return nullptr;
    if (whole == Py_NotImplemented) {
      Py_DECREF(whole);
      return not_ours();
    }
    PyTuple_SET_ITEM(made.get(), column, whole);
  }
  return PyTuple_Pack(2, counts.get(), made.get());
}
