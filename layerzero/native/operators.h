// A part of hot.cpp: `Operator`, what `torch.ops.layerzero` calls first: a known call runs without torch's dispatcher.
//
// It stands in the place of torch's own callable of one operator, `below`, which gets every call that is not known:
// `modes_of_known` says so under every mode, transform or trace, and `plain` of every tensor without memory of its own.
// What a profiler listens to goes to the dispatcher, too, so that it sees the operator.

#pragma once

struct Operator {
  PyObject_HEAD
  PyObject *names, *defaults;  // of the operator; `...` for a parameter that needs a value
  PyObject *targets;           // by parameter: the place of its value in the op's arguments, or -1: None goes nowhere
  PyObject *fixed;             // by argument of the op: what the operator's name decides, else `...`
  PyObject *plans, *below, *lay_out;
  PyObject* attributes;
  Py_ssize_t positional, layout;  // layout: the op's argument that says where heads lie, or -1
  char returns_none;

  template <typename F>
  void each(F&& visit) {
    all_of(visit, names, defaults, targets, fixed, plans, below, lay_out, attributes);
  }
};

PyTypeObject* OperatorType = nullptr;

// Whether the heads of attention's output lie behind its tokens in memory, as its operator promises.
bool tokens_first(const at::Tensor& out) {
  if (out.dim() != 4) return false;
  const auto sizes = out.sizes(), strides = out.strides();
  int64_t expected = 1;
  for (const int axis : {3, 1, 2, 0}) {
    if (sizes[axis] != 1 && strides[axis] != expected) return false;
    expected *= sizes[axis];
  }
  return true;
}

bool is_laid_out(PyObject* out, bool heads) {
  if (!is_tensor(out)) return false;
  const at::Tensor& tensor = THPVariable_Unpack(out);
  return heads ? tokens_first(tensor) : tensor.is_contiguous();
}

// A kernel's result as the operator promises it: copied by Python where the layout in memory is another.
PyObject* promised(Operator* self, Ref out, bool heads) {
  if (!out || self->returns_none) return out ? none() : nullptr;
  bool right = true;
  if (PyTuple_CheckExact(out.get())) {
    for (Py_ssize_t i = 0; right && i < PyTuple_GET_SIZE(out.get()); ++i)
      right = is_laid_out(PyTuple_GET_ITEM(out.get(), i), heads && i == 0);
  } else {
    right = is_laid_out(out.get(), heads);
  }
  if (right) return out.release();
  return PyObject_CallFunctionObjArgs(self->lay_out, out.get(), heads ? Py_True : Py_False, nullptr);
}

// The op's arguments out of the operator's, `...` where nothing is given; false where only torch can read them.
bool op_arguments(const Operator* self, PyObject* args, PyObject* kwargs, PyObject** values) {
  PyObject* given[MAX_PARAMETERS];
  if (!bind(self, args, kwargs, given)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->fixed); ++i) {
    PyObject* constant = PyTuple_GET_ITEM(self->fixed, i);
    values[i] = constant == Py_Ellipsis ? nullptr : constant;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->names); ++i) {
    const Py_ssize_t target = PyLong_AsSsize_t(PyTuple_GET_ITEM(self->targets, i));
    PyObject* value = given[i] == nullptr ? PyTuple_GET_ITEM(self->defaults, i) : given[i];
    if (target >= 0) {
      values[target] = value;
    } else if (value != Py_None) {
      return false;  // a backend, or a number of each row
    }
  }
  return true;
}

PyObject* run_operator(Operator* self, PyObject* args, PyObject* kwargs) {
  auto* plans = reinterpret_cast<Plans*>(self->plans);
  const int modes = at::hasCallbacks() ? -1 : modes_of_known(plans);
  if (modes < 0) return PyErr_Occurred() ? nullptr : not_ours();
  PyObject* values[MAX_PARAMETERS];
  if (!op_arguments(self, args, kwargs, values)) return not_ours();
  bool heads = false;
  if (self->layout >= 0) {
    PyObject* layout = values[self->layout];
    if (!PyUnicode_CheckExact(layout)) return not_ours();
    heads = PyUnicode_CompareWithASCIIString(layout, "BSHD") != 0;
  }
  Ref out(run_bound(plans, modes, values));
  return out.get() == Py_NotImplemented ? out.release() : promised(self, std::move(out), heads);
}

PyObject* operator_call(Operator* self, PyObject* args, PyObject* kwargs) {
  PyObject* out = guarded([&] { return run_operator(self, args, kwargs); });
  if (out != Py_NotImplemented) return out;
  Py_DECREF(out);
  return PyObject_Call(self->below, args, kwargs);
}

// Operator(names, defaults, targets, fixed, layout, returns_none, plans, below, lay_out)
PyObject* operator_new(PyTypeObject* type, PyObject* given, PyObject*) {
  PyObject *names, *defaults, *targets, *fixed, *plans, *below, *lay_out;
  Py_ssize_t layout;
  int returns_none;
  if (!PyArg_ParseTuple(given, "O!O!O!O!npO!OO", &PyTuple_Type, &names, &PyTuple_Type, &defaults, &PyTuple_Type, &targets,
                        &PyTuple_Type, &fixed, &layout, &returns_none, PlansType, &plans, &below, &lay_out))
    return nullptr;
  const Py_ssize_t all = PyTuple_GET_SIZE(fixed), count = PyTuple_GET_SIZE(names);
  bool fits = all == PyTuple_GET_SIZE(reinterpret_cast<Plans*>(plans)->names) && layout < all &&
              PyTuple_GET_SIZE(targets) == count;
  for (Py_ssize_t i = 0; fits && i < count; ++i) {
    const Py_ssize_t target = PyLong_AsSsize_t(PyTuple_GET_ITEM(targets, i));
    if (target == -1 && PyErr_Occurred()) return nullptr;
    fits = target < all;
  }
  if (!fits) {
    PyErr_SetString(PyExc_ValueError, "an operator needs a target for each name among the op's arguments");
    return nullptr;
  }
  Ref own(interned(names, defaults)), attributes(PyDict_New());
  if (!own || !attributes) return nullptr;
  auto* self = made<Operator>(type, {own.get(), defaults, targets, fixed, plans, below, lay_out, attributes.get()});
  if (self == nullptr) return nullptr;
  self->positional = count;
  self->layout = layout;
  self->returns_none = char(returns_none);
  PyObject_GC_Track(self);
  return reinterpret_cast<PyObject*>(self);
}

// torch's operators have the hash of what they call, and are in tables already.
Py_hash_t operator_hash(Operator* self) { return PyObject_Hash(self->below); }

PyMemberDef operator_members[] = {
    {"below", T_OBJECT, offsetof(Operator, below), READONLY, nullptr},
    {"__dictoffset__", T_PYSSIZET, offsetof(Operator, attributes), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyTypeObject* operator_class() {
  return class_of<Operator>("layerzero.native.Operator", "What torch's operator of an op calls: known calls run here.",
                            {slot(Py_tp_new, operator_new), slot(Py_tp_call, operator_call),
                             slot(Py_tp_hash, operator_hash), slot(Py_tp_members, operator_members)});
}
