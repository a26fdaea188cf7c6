// A part of hot.cpp: `Call`, the coroutine of one call of an op or of a batched function.
//
// A call that is known goes into its line when it is first awaited, or runs at once, and comes back with its value: no frame
// of Python's stands between its caller and the lane. Every other call is the coroutine that `follow` makes.

#pragma once

struct Call {
  PyObject_HEAD
  PyObject *cache, *args, *kwargs;
  PyObject *ticket, *inner;  // what it waits for: a ticket of its own, or Python's coroutine
  PyObject* weak;
  char begun;

  template <typename F>
  void each(F&& visit) {
    all_of(visit, cache, args, kwargs, ticket, inner);
  }
  bool unfinished() const { return !begun; }
  Awaited* awaited() const { return reinterpret_cast<Awaited*>(cache); }
};

PyTypeObject* CallType = nullptr;
// As Python says.
constexpr const char *AWAITED_ALREADY = "coroutine is being awaited already", *ENDED = "cannot reuse already awaited coroutine";

PyObject* new_call(Awaited* cache, PyObject* args, PyObject* kwargs) {
  if (!PyTuple_CheckExact(args) || (kwargs != nullptr && !PyDict_CheckExact(kwargs))) {
    PyErr_SetString(PyExc_TypeError, "a call needs a tuple and a dict");
    return nullptr;
  }
  auto* call = made<Call>(CallType, {reinterpret_cast<PyObject*>(cache), args, kwargs, nullptr, nullptr});
  if (call == nullptr) return nullptr;
  call->weak = nullptr;
  call->begun = 0;
  PyObject_GC_Track(call);
  return reinterpret_cast<PyObject*>(call);
}

PyObject* kinds_call(Kinds* self, PyObject* args) { return new_call(self, args, nullptr); }

PyObject* memo_call(Memo* self, PyObject* const* given, Py_ssize_t count) {
  if (count == 2) return new_call(self, given[0], given[1]);
  PyErr_SetString(PyExc_TypeError, "a call needs a tuple and a dict");
  return nullptr;
}

// The name of what is called; never empty.
Ref name_of(Call* self) {
  PyObject* subject = self->cache == nullptr ? nullptr : self->awaited()->subject;
  Ref name(subject == nullptr ? nullptr : PyObject_GetAttr(subject, known.name));
  if (name && PyUnicode_Check(name.get())) return name;
  PyErr_Clear();
  return Ref::to(known.call);
}

PyObject* call_name(Call* self, void*) { return name_of(self).release(); }

// A call that nobody awaited is a mistake, as with every coroutine.
void call_finalize(Call* self) {
  if (self->begun) return;
  self->begun = 1;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  Ref name = name_of(self);
  if (PyErr_WarnFormat(PyExc_RuntimeWarning, 1, "coroutine '%U' was never awaited", name.get()))
    PyErr_WriteUnraisable(reinterpret_cast<PyObject*>(self));
  PyErr_Restore(type, value, trace);
}

// Whether a ticket that was found here goes into its line without a look of Python's, and is there.
// Throws: PythonError.
bool in_line(Call* self, Ticket* ticket) {
  Ref front = Ref::to(ticket->front);
  // A task that is alone may run it at once; another grad mode than the loop's leaves with its caller, where that
  // has none of its own.
  if (!has(in_front.lane, front.get()) || !in_front.alone.is(front.get(), Py_None)) return false;
  const int modes = ticket->surroundings;
  if (!carrying && !(modes & INFERENCE) && bool(modes & GRAD) != in_front.ambient_grad.is(front.get(), Py_True)) return false;
  Ref at_once = in_front.at_once.of(front.get());  // groups whose calls Python runs without a queue
  if (PyDict_GET_SIZE(at_once.get()) != 0 && looked_up(at_once.get(), ticket->group == Py_None ? ticket->op : ticket->group))
    return false;
  PyObject* validate = Py_TYPE(self->cache) == MemoType ? reinterpret_cast<Memo*>(self->cache)->validate : Py_None;
  if (validate != Py_None) {
    Ref checked(PyObject_CallOneArg(validate, ticket->args));
    if (!checked) throw PythonError();
    put(ticket->args, checked.release());
  }
  if (queued(front.get(), ticket)) return true;
  Ref waits(PyObject_CallMethod(front.get(), "submit", "O", ticket));  // whose caller or place is new
  if (!waits) throw PythonError();
  return true;
}

// Its value, once the ticket has ended; the thread's last plan is noted and its modes are as they were.
PyObject* value_of(Call* self, Ticket* ticket) {
  if (ticket->state != DONE) {
    raise_error(ticket);
    return nullptr;
  }
  PyObject* pair = ticket->value;
  if (pair == nullptr || !PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2) {
    PyErr_SetString(PyExc_TypeError, "the outcome of a call needs to be a value and a plan");
    return nullptr;
  }
  Ref value = Ref::to(PyTuple_GET_ITEM(pair, 0));
  if (PyObject_SetAttr(self->awaited()->last, known.plan, PyTuple_GET_ITEM(pair, 1))) return nullptr;
  if (ticket->surroundings != modes_here() || !on_default_stream(ticket->place)) {
    Ref restored(PyObject_CallOneArg(self->awaited()->restore, ticket->modes));
    if (!restored) return nullptr;
  }
  return value.release();
}

PySendResult call_begin(Call* self, PyObject** out) {
  self->begun = 1;
  Ref args(std::exchange(self->args, nullptr)), kwargs(std::exchange(self->kwargs, nullptr));  // they die with the batch
  bool ran = false;
  Ref got = Py_TYPE(self->cache) == MemoType ? found(reinterpret_cast<Memo*>(self->cache), args.get(), kwargs.get(), &ran)
                                             : found(reinterpret_cast<Kinds*>(self->cache), args.get());
  if (PyErr_Occurred()) return PYGEN_ERROR;
  if (ran) {
    *out = got.release();
    return PYGEN_RETURN;
  }
  if (got && in_line(self, reinterpret_cast<Ticket*>(got.get()))) {
    reinterpret_cast<Ticket*>(got.get())->blocking = 1;
    self->ticket = Ref::to(got.get()).release();
    *out = got.release();
    return PYGEN_NEXT;
  }
  if (!kwargs) kwargs = Ref(PyDict_New());
  if (!kwargs) return PYGEN_ERROR;
  PyObject* given[] = {got ? got.get() : Py_None, args.get(), kwargs.get()};
  self->inner = PyObject_Vectorcall(self->awaited()->follow, given, 3, nullptr);
  return self->inner == nullptr ? PYGEN_ERROR : PyIter_Send(self->inner, Py_None, out);
}

PySendResult call_send(Call* self, PyObject* given, PyObject** out) {
  *out = nullptr;
  PySendResult how = PYGEN_ERROR;
  if (self->inner != nullptr) {
    Ref inner = Ref::to(self->inner);
    how = PyIter_Send(inner.get(), given, out);
  } else if (self->ticket != nullptr && reinterpret_cast<Ticket*>(self->ticket)->state <= RUNNING) {
    PyErr_SetString(PyExc_RuntimeError, AWAITED_ALREADY);
    return PYGEN_ERROR;
  } else if (self->ticket != nullptr) {
    Ref ticket(std::exchange(self->ticket, nullptr));
    *out = value_of(self, reinterpret_cast<Ticket*>(ticket.get()));
    how = *out == nullptr ? PYGEN_ERROR : PYGEN_RETURN;
  } else if (!self->begun && given != Py_None) {
    PyErr_SetString(PyExc_TypeError, "can't send non-None value to a just-started coroutine");
    return PYGEN_ERROR;
  } else if (!self->begun) {
    try {
      how = call_begin(self, out);
    } catch (const PythonError&) {
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
  } else {
    PyErr_SetString(PyExc_RuntimeError, ENDED);
  }
  if (how != PYGEN_NEXT) Py_CLEAR(self->inner);
  return how;
}

// Of two that await one call the second is told so, and the first gets its value.
PyObject* call_await(Call* self) {
  if (self->ticket == nullptr && self->inner == nullptr) return Ref::to(reinterpret_cast<PyObject*>(self)).release();
  PyErr_SetString(PyExc_RuntimeError, AWAITED_ALREADY);
  return nullptr;
}

// throw(error), or throw(type, value, traceback): raised where it waits. A ticket of its own stays where it is, as
// under a coroutine of Python's: who cancels has taken it back before.
PyObject* call_throw(Call* self, PyObject* const* given, Py_ssize_t count) {
  if (count < 1 || count > 3) {
    PyErr_SetString(PyExc_TypeError, "throw needs an error, or its type, value and traceback");
    return nullptr;
  }
  if (self->begun && self->inner == nullptr && self->ticket == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, ENDED);
    return nullptr;
  }
  self->begun = 1;
  if (self->inner != nullptr) {
    Ref inner = Ref::to(self->inner);
    Ref method(PyObject_GetAttrString(inner.get(), "throw"));
    PyObject* value = method ? PyObject_Vectorcall(method.get(), given, count, nullptr) : nullptr;
    if (value == nullptr) Py_CLEAR(self->inner);
    return value;
  }
  Py_CLEAR(self->ticket);
  PyObject* type = given[0];
  if (PyExceptionInstance_Check(type)) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(type)), type);
    return nullptr;
  }
  if (!PyExceptionClass_Check(type)) {
    PyErr_Format(PyExc_TypeError, "exceptions must be classes or instances deriving from BaseException, not %s",
                 Py_TYPE(type)->tp_name);
    return nullptr;
  }
  PyErr_SetObject(type, count > 1 && given[1] != Py_None ? given[1] : nullptr);
  return nullptr;
}

PyObject* call_close(Call* self, PyObject*) {
  self->begun = 1;
  Ref inner(std::exchange(self->inner, nullptr));
  Py_CLEAR(self->ticket);
  return inner ? PyObject_CallMethod(inner.get(), "close", nullptr) : none();
}

PyMethodDef call_methods[] = {
    method("send", sent<call_send, Call>, METH_O, "Go on with it."),
    method("throw", call_throw, METH_FASTCALL, "Raise an error where it waits."),
    method("close", call_close, METH_NOARGS, "End it."),
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef call_getset[] = {{"__name__", reinterpret_cast<getter>(call_name), nullptr, "What is called.", nullptr},
                             {"__qualname__", reinterpret_cast<getter>(call_name), nullptr, "What is called.", nullptr},
                             {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMemberDef call_members[] = {{"__weaklistoffset__", T_PYSSIZET, offsetof(Call, weak), READONLY, nullptr},
                              {nullptr, 0, 0, 0, nullptr}};

PyTypeObject* call_class() {
  return class_of<Call>("layerzero.native.Call", "The coroutine of one call.",
                        {slot(Py_tp_finalize, call_finalize), slot(Py_tp_methods, call_methods),
                         slot(Py_tp_members, call_members), slot(Py_tp_getset, call_getset), slot(Py_tp_iter, PyObject_SelfIter),
                         slot(Py_tp_iternext, next_of<call_send, Call>), slot(Py_am_await, call_await),
                         slot(Py_am_send, call_send)},
                        Py_TPFLAGS_DISALLOW_INSTANTIATION);
}
