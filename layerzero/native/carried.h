// A part of hot.cpp: `IsolatedCoroutine`, a coroutine that has torch's modes to itself; layerzero/scheduler/modes/task_modes.py.

#pragma once

constexpr c10::DeviceType CAST_ON[] = {c10::DeviceType::CPU, c10::DeviceType::CUDA};  // what a runtime opens
constexpr int CASTS = 2;

// Of autocast what is no dispatch key. Outside of it nobody looks: what a thread has then is noted where a coroutine
// is made, and comes back where one waits inside.
struct Casting {
  at::ScalarType casts[CASTS];
  int nesting;
  bool caching;

  static Casting here() {
    Casting now;
    for (int i = 0; i < CASTS; ++i) now.casts[i] = at::autocast::get_autocast_dtype(CAST_ON[i]);
    now.nesting = at::autocast::increment_nesting() - 1;
    at::autocast::decrement_nesting();
    now.caching = at::autocast::is_autocast_cache_enabled();
    return now;
  }

  bool operator==(const Casting& other) const {
    return casts[0] == other.casts[0] && casts[1] == other.casts[1] && nesting == other.nesting && caching == other.caching;
  }
};

thread_local Casting resting = Casting::here();

// What of a thread's state Python's blocks change, as far as values go; `stacked` where a stack is not empty, which
// they nearly always are. Not the profiler's: it watches a thread, no task.
struct Values {
  uint64_t included, excluded;
  Casting casting;
  uint8_t flags;
  bool usual, stacked;  // no dispatch key is in force beside those of inference mode

  // As they are in this thread now.
  static Values here() {
    Values now;
    const auto keys = c10::impl::tls_local_dispatch_key_set();
    const c10::AutogradState& autograd = c10::AutogradState::get_tls_state();
    const bool inference = autograd.get_inference_mode();
    auto included = c10::default_included_set;
    auto excluded = c10::default_excluded_set;
    if (inference) {
      included = included.remove(c10::DispatchKey::ADInplaceOrView);
      excluded = excluded | c10::autograd_dispatch_keyset;
    }
    now.usual = keys.included_ == included && keys.excluded_ == excluded;
    now.included = keys.included_.raw_repr();
    now.excluded = keys.excluded_.raw_repr();
    now.casting = now.usual ? resting : Casting::here();
    now.flags = uint8_t(autograd.get_grad_mode() | inference << 1 | autograd.get_fw_grad_mode() << 2 |
                        autograd.get_multithreading_enabled() << 3);
    const auto& saving = at::SavedTensorDefaultHooks::get_tls_state();
    now.stacked = at::impl::PythonTorchFunctionTLS::stack_len() != 0 ||
                  at::impl::PythonTorchFunctionTLS::get_disabled_state() != at::impl::TorchFunctionDisabledState::ENABLED ||
                  !saving.stack.empty() || saving.disabled_error_message ||
                  (!now.usual && c10::impl::TorchDispatchModeTLS::stack_len() != 0);
    return now;
  }

  // Whether nothing of it can be put aside: a transform's levels and a tracer's state are more than these.
  bool bound() const {
    const c10::DispatchKeySet keys(c10::DispatchKeySet::RAW, included);
    return keys.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) || keys.has(c10::DispatchKey::PythonDispatcher);
  }

  bool operator==(const Values& other) const {
    return included == other.included && excluded == other.excluded && flags == other.flags && !stacked &&
           !other.stacked && ((usual && other.usual) || casting == other.casting);
  }
};

// The stacks of a thread.
struct Stacks {
  at::impl::PythonTorchFunctionTLS functions;
  c10::impl::TorchDispatchModeTLS dispatches;
  at::impl::SavedTensorDefaultHooksTLS hooks;
};

// A thread's state, to be put in force again.
struct Surroundings {
  Values values;
  c10::AutogradState autograd = c10::AutogradState::get_tls_state();
  std::unique_ptr<Stacks> stacks;

  explicit Surroundings(const Values& now) : values(now) {
    values.casting = Casting::here();
    if (now.stacked)
      stacks.reset(new Stacks{at::impl::PythonTorchFunctionTLS::get_state(), c10::impl::TorchDispatchModeTLS::get_state(),
                              at::SavedTensorDefaultHooks::get_tls_state()});
  }

  // Put them in force, where `now` is.
  void enter(const Values& now) const {
    const Values& then = values;
    c10::AutogradState::set_tls_state(autograd);
    if (!(then.usual && now.usual)) {
      const Casting &casting = then.casting, current = Casting::here();
      for (int i = 0; i < CASTS; ++i) at::autocast::set_autocast_dtype(CAST_ON[i], casting.casts[i]);
      for (int i = current.nesting; i < casting.nesting; ++i) at::autocast::increment_nesting();
      for (int i = casting.nesting; i < current.nesting; ++i) at::autocast::decrement_nesting();
      at::autocast::set_autocast_cache_enabled(casting.caching);
    }
    if (then.stacked || now.stacked) {
      at::impl::PythonTorchFunctionTLS::set_state(stacks ? stacks->functions : at::impl::PythonTorchFunctionTLS());
      c10::impl::TorchDispatchModeTLS::set_state(stacks ? stacks->dispatches : c10::impl::TorchDispatchModeTLS());
      at::SavedTensorDefaultHooks::set_tls_state(stacks ? stacks->hooks : at::impl::SavedTensorDefaultHooksTLS());
    }
    auto keys = c10::impl::tls_local_dispatch_key_set();
    keys.included_ = c10::DispatchKeySet(c10::DispatchKeySet::RAW, then.included);
    keys.excluded_ = c10::DispatchKeySet(c10::DispatchKeySet::RAW, then.excluded);
    c10::impl::_force_tls_local_dispatch_key_set(keys);  // last: entering a stack changes keys too
  }
};

thread_local int carrying = 0;  // steps of carried coroutines that this thread is inside of

struct Carried {
  PyObject_HEAD
  PyObject* inner;
  PyObject* weak;
  Surroundings* own;   // at its last suspension; at its creation before the first step
  Values born;         // at its creation
  char ended;

  template <typename F>
  void each(F&& visit) {
    all_of(visit, inner);
  }
  bool unfinished() const { return true; }
  void end() { delete own; }
};

PyTypeObject* CarriedType = nullptr;

// Do `body`, one step of the coroutine, in its own surroundings; those of the thread are as before. What a
// coroutine has set and not taken back when it ends stays in force, as without all this.
template <typename F>
PySendResult in_own(Carried* self, F&& body) {
  const Values before = Values::here();
  if (before.bound() || self->own->values.bound()) return body();
  std::unique_ptr<Surroundings> outside;
  if (!(self->own->values == before)) {
    outside.reset(new Surroundings(before));
    self->own->enter(before);
  }
  ++carrying;
  const PySendResult how = body();
  --carrying;
  const Values after = Values::here();
  if (how != PYGEN_NEXT) self->ended = 1;
  if (after.bound()) return how;
  if (after == before) {
    if (outside) delete std::exchange(self->own, outside.release());
    return how;
  }
  std::unique_ptr<Surroundings> own(new Surroundings(after));
  // Where none was put aside, its own of before the step is what the thread had.
  const bool stays = how != PYGEN_NEXT && !after.stacked && !(after == self->born);
  if (!stays) (outside ? *outside : *self->own).enter(after);
  delete std::exchange(self->own, own.release());
  return how;
}

PyObject* carried_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* inner;
  if (!PyArg_ParseTuple(args, "O", &inner)) return nullptr;
  auto* self = made<Carried>(type, {inner});
  if (self == nullptr) return nullptr;
  self->weak = nullptr;
  self->born = Values::here();
  if (self->born.usual) self->born.casting = resting = Casting::here();
  self->own = new Surroundings(self->born);
  self->ended = 0;
  PyObject_GC_Track(self);
  return reinterpret_cast<PyObject*>(self);
}

PySendResult carried_send(Carried* self, PyObject* given, PyObject** out) {
  Ref inner = Ref::to(self->inner);
  return in_own(self, [&] { return PyIter_Send(inner.get(), given, out); });
}

// A method of the coroutine that gives the next thing it waits for, or raises.
PyObject* carried_method(Carried* self, const char* name, PyObject* const* given, Py_ssize_t count) {
  Ref inner = Ref::to(self->inner), value;
  in_own(self, [&] {
    Ref method(PyObject_GetAttrString(inner.get(), name));
    if (method) value = Ref(PyObject_Vectorcall(method.get(), given, count, nullptr));
    return value ? PYGEN_NEXT : PYGEN_ERROR;
  });
  return value.release();
}

PyObject* carried_throw(Carried* self, PyObject* const* given, Py_ssize_t count) {
  return carried_method(self, "throw", given, count);
}

PyObject* carried_close(Carried* self, PyObject*) {
  PyObject* value = carried_method(self, "close", nullptr, 0);
  self->ended = 1;
  return value;
}

PyObject* carried_await(Carried* self) { return Ref::to(reinterpret_cast<PyObject*>(self)).release(); }

PyObject* carried_getattr(PyObject* self, PyObject* name) {
  PyObject* value = PyObject_GenericGetAttr(self, name);
  if (value != nullptr || !PyErr_ExceptionMatches(PyExc_AttributeError)) return value;
  PyErr_Clear();
  return PyObject_GetAttr(reinterpret_cast<Carried*>(self)->inner, name);  // cr_frame, __qualname__ and the like
}

// One that is dropped where it waits leaves its blocks in its own surroundings, not in those of who drops it.
void carried_finalize(Carried* self) {
  if (self->ended || self->inner == nullptr || self->own->values == self->born) return;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  Ref closed(carried_close(self, nullptr));
  if (!closed) PyErr_WriteUnraisable(reinterpret_cast<PyObject*>(self));
  PyErr_Restore(type, value, trace);
}

PyMethodDef carried_methods[] = {
    method("send", sent<carried_send, Carried>, METH_O, "Go on with it."),
    method("throw", carried_throw, METH_FASTCALL, "Raise an error where it waits."),
    method("close", carried_close, METH_NOARGS, "End it."),
    {nullptr, nullptr, 0, nullptr}};
PyMemberDef carried_members[] = {{"__weaklistoffset__", T_PYSSIZET, offsetof(Carried, weak), READONLY, nullptr},
                                 {nullptr, 0, 0, 0, nullptr}};

PyTypeObject* carried_class() {
  return class_of<Carried>(
      "layerzero.native.IsolatedCoroutine", "A coroutine with modes of its own; layerzero.scheduler.modes.task_modes.Carried.",
      {slot(Py_tp_new, carried_new), slot(Py_tp_finalize, carried_finalize), slot(Py_tp_getattro, carried_getattr),
       slot(Py_tp_methods, carried_methods), slot(Py_tp_members, carried_members), slot(Py_tp_iter, PyObject_SelfIter),
       slot(Py_tp_iternext, next_of<carried_send, Carried>), slot(Py_am_await, carried_await),
       slot(Py_am_send, carried_send)});
}

// carries(): whether the coroutine that runs here has modes of its own.
PyObject* carries(PyObject*, PyObject*) { return PyBool_FromLong(carrying); }
