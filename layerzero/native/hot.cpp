// The awaited call's own steps, compiled: what Python does here one attribute at a time.
//
// Everything in this file has a twin in Python that gives the same results; nothing here decides anything.
// `Memo` remembers, for one op, what the Python path has found out about a call, under a key made of all that
// can change the answer. `PendingCall` is the future of one queued call. `rejoin`, `gather` and `split` put rows
// together and take them apart; `begin`, `land` and `resume` take a whole batch of tickets through its states.
// `Kinds` (functions.h) is the memo of a batched function, `queue` (queue.h) the way of a known call into its line, at_once.h the way past it,
// `Call` (calls.h) what awaits one, `IsolatedCoroutine` (carried.h) a coroutine that has torch's modes to itself. What an op
// reads places from is copied while it is checked (indices.h, numbers.h); `Plans` (plans.h) knows an op's blocking calls,
// for torch's operator of it, too (operators.h),
// `BatchPlans` (rows.h) what its batches become.
// A function that meets what it does not know returns None or NotImplemented, and Python does the work.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#ifdef Py_GIL_DISABLED
#error "this module counts on the lock of the interpreter"
#endif

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <pthread.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace at {  // from ATen/record_function.h
TORCH_API bool hasCallbacks();
}

namespace at::autocast {  // from ATen/autocast_mode.h, which takes longer to compile than all of this
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API void set_autocast_dtype(at::DeviceType device_type, at::ScalarType dtype);
TORCH_API int increment_nesting();
TORCH_API int decrement_nesting();
TORCH_API bool is_autocast_cache_enabled();
TORCH_API void set_autocast_cache_enabled(bool enabled);
}  // namespace at::autocast

namespace {

#include "classes.h"

// As in scheduler/core/pending_call.py.
enum State { NEW, WAITING, QUEUED, RUNNING, DETACHED, DONE, FAILED, CANCELLED, EXPIRED, REJECTED };

// -- references ---------------------------------------------------------------------------------------

class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : it_(owned) {}
  Ref(Ref&& other) noexcept : it_(std::exchange(other.it_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(it_, other.it_);
    return *this;
  }
  ~Ref() { Py_XDECREF(it_); }
  static Ref to(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Ref(borrowed);
  }
  PyObject* get() const { return it_; }
  PyObject* release() { return std::exchange(it_, nullptr); }
  explicit operator bool() const { return it_ != nullptr; }

 private:
  PyObject* it_ = nullptr;
};

PyObject* none() { Py_RETURN_NONE; }
PyObject* not_ours() { Py_RETURN_NOTIMPLEMENTED; }

void put(PyObject*& field, PyObject* owned) {
  PyObject* old = field;
  field = owned;
  Py_XDECREF(old);
}

void put_new(PyObject*& field, PyObject* borrowed) {
  Py_XINCREF(borrowed);
  put(field, borrowed);
}

// A Python error is set, and the function that stands in Python's place returns null.
struct PythonError {};

// C++ errors become Python's.
template <typename F>
PyObject* guarded(F&& body) {
  try {
    return body();
  } catch (const PythonError&) {
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// This thread without the interpreter's lock, until the end of a block.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// What a coroutine's step gives as Python's `send` returns it.
PyObject* stopped(PySendResult how, PyObject* value) {
  if (how != PYGEN_RETURN) return value;
  Ref owned(value);
  // By hand: as an argument a tuple would be spread.
  Ref stop(PyObject_CallOneArg(PyExc_StopIteration, value));
  if (stop) PyErr_SetObject(PyExc_StopIteration, stop.get());
  return nullptr;
}

// The methods `send` and `__next__` of a class whose step is `Step`.
template <auto Step, typename T>
PyObject* sent(T* self, PyObject* given) {
  PyObject* value;
  const PySendResult how = Step(self, given, &value);
  return stopped(how, value);
}

template <auto Step, typename T>
PyObject* next_of(T* self) {
  return sent<Step>(self, Py_None);
}

// Names and constants that are made once.
struct Known {
  PyObject *devices, *snapshot, *context, *wake, *call_soon, *on, *empty, *plan, *us_per_row, *call, *name;
  PyObject *running_loop, *thread_id;
  PyObject *forward, *current_level;  // the names of torch.autograd.forward_ad, and the one that says its level
  PyObject *task, *ended;  // asyncio's class, and a future with a result
};
Known known;

// asyncio's class of tasks, and a future of no loop that has ended; false with an error set.
bool know_tasks(PyObject* events) {
  known.task = PyObject_GetAttrString(events, "Task");
  Ref kind(PyObject_GetAttrString(events, "Future")), mocks(PyImport_ImportModule("types"));
  if (known.task == nullptr || !kind || !mocks) return false;
  Ref namespaces(PyObject_GetAttrString(mocks.get(), "SimpleNamespace"));
  Ref nobody(PyDict_New()), none(PyTuple_New(0));
  if (!namespaces || !nobody || !none) return false;
  // All that a future asks its loop for here is whether to remember where it was made: bool() says no.
  if (PyDict_SetItemString(nobody.get(), "get_debug", reinterpret_cast<PyObject*>(&PyBool_Type))) return false;
  Ref loop(PyObject_Call(namespaces.get(), none.get(), nobody.get())), named(PyDict_New());
  if (!loop || !named || PyDict_SetItemString(named.get(), "loop", loop.get())) return false;
  known.ended = PyObject_Call(kind.get(), none.get(), named.get());
  if (known.ended == nullptr) return false;
  Ref set(PyObject_CallMethod(known.ended, "set_result", "O", Py_None));
  return bool(set);
}

// How often this process was forked off another: a child's thread has the number of its parent's, and the parent's
// loop does not run in it.
int forks = 0;

// A running event loop, and the process that it was seen in.
struct Loop {
  Ref loop;
  int forked = 0;
};

// The running event loop; `last` is the last one, which says itself whether it still runs in this thread.
// asyncio's own answer costs a system call. Empty where none runs: Python says what that needs.
Ref loop_here(Loop& last) {
  Ref& seen = last.loop;
  if (seen && last.forked == forks) {
    Ref thread(PyObject_GetAttr(seen.get(), known.thread_id));
    if (thread && PyLong_CheckExact(thread.get()) &&
        PyLong_AsUnsignedLong(thread.get()) == PyThread_get_thread_ident())
      return Ref::to(seen.get());
    PyErr_Clear();
  }
  Ref loop(PyObject_CallNoArgs(known.running_loop));
  if (loop) {
    seen = Ref::to(loop.get());
    last.forked = forks;
  } else if (PyErr_ExceptionMatches(PyExc_RuntimeError)) {
    PyErr_Clear();
  }
  return loop;
}

// -- torch's modes ------------------------------------------------------------------------------------

constexpr int GRAD = 1, INFERENCE = 2, DETERMINISTIC = 4;

// The mask of `scheduler/modes/torch_modes.py`, or -1 where autocast, a dispatch or function mode or a functorch transform
// is in force: each of those changes this thread's dispatch keys, or stands on the function mode stack.
int modes_here() {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const bool inference = c10::InferenceMode::is_enabled();
  auto included = c10::default_included_set;
  auto excluded = c10::default_excluded_set;
  if (inference) {
    included = included.remove(c10::DispatchKey::ADInplaceOrView);
    excluded = excluded | c10::autograd_dispatch_keyset;
  }
  if (local.included_ != included || local.excluded_ != excluded) return -1;
  if (at::impl::PythonTorchFunctionTLS::stack_len() != 0) return -1;
  return (c10::GradMode::is_enabled() ? GRAD : 0) | (inference ? INFERENCE : 0) |
         (at::globalContext().deterministicAlgorithms() ? DETERMINISTIC : 0);
}

// Which implementations of torch's attention are switched off (`torch.nn.attention.sdpa_kernel`), above the bits of
// `modes_here`: a part of every key, since a choice made under one set is none under another.
int switches_here() {
  const auto& context = at::globalContext();
  return (context.userEnabledFlashSDP() ? 0 : 8) | (context.userEnabledMemEfficientSDP() ? 0 : 16) |
         (context.userEnabledMathSDP() ? 0 : 32) | (context.userEnabledCuDNNSDP() ? 0 : 64);
}

// Whether hooks of this thread see what a call under these modes saves for its backward pass: it leaves no thread.
bool hooked(int modes) {
  return (modes & GRAD) && !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

// Whether tensors may have tangents: inside a level of forward-mode differentiation, which is the process's.
bool forward_level() {
  PyObject* level = PyDict_GetItem(known.forward, known.current_level);
  return level == nullptr || !PyLong_Check(level) || PyLong_AsLong(level) >= 0;
}

// Where a tensor lies: a CUDA device's index, or one of these.
constexpr int HOST = -1, ELSEWHERE = -2;

int place_of(const c10::TensorImpl* impl) {
  const c10::Device device = impl->device();
  return device.is_cpu() ? HOST : device.is_cuda() ? int(device.index()) : ELSEWHERE;
}

// Whether a CUDA device's default stream is the current one, which no graph is captured on; true for the host.
bool on_default_stream(int place) {
  if (place == HOST) return true;
  const auto* torchs = c10::impl::device_guard_impl_registry[size_t(c10::DeviceType::CUDA)].load();
  return torchs != nullptr &&
         torchs->getStream(c10::Device(c10::DeviceType::CUDA, c10::DeviceIndex(place))).id() == 0;
}

// -- tickets ------------------------------------------------------------------------------------------

struct Ticket {
  PyObject_HEAD
  PyObject *op, *args, *group, *modes, *snapshot, *caller, *slot, *value, *wake, *context, *front, *loop, *deadline,
      *plan, *device;
  PyObject* weak;
  double at, expected_us;
  long long seq, tokens, bytes;
  int state, priority, surroundings, place;
  char blocking, waiting;

  template <typename F>
  void each(F&& visit) {
    all_of(visit, op, args, group, modes, caller, slot, value, wake, context, front, loop, deadline, plan, snapshot, device);
  }
};

PyTypeObject* TicketType = nullptr;
bool is_ticket(PyObject* object) { return Py_TYPE(object) == TicketType; }

Ticket* blank_ticket() {
  auto* self = PyObject_GC_New(Ticket, TicketType);
  if (self == nullptr) return nullptr;
  std::memset(&self->op, 0, sizeof(Ticket) - offsetof(Ticket, op));
  self->tokens = self->priority = 1;
  self->surroundings = -1;
  self->place = HOST;
  return self;
}

PyObject* ticket_new(PyTypeObject*, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"op",       "args",     "batch_key", "expected_us", "tokens", "bytes",
                                "priority", "deadline", "modes", "snapshot",    "caller", nullptr};
  PyObject *op, *full, *group = Py_None, *priority = nullptr, *deadline = Py_None, *modes = Py_None,
                       *snapshot = Py_None, *caller = Py_None;
  double expected_us = 0.0;
  long long tokens = 1, bytes = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|OdLLOOOOO:PendingCall", const_cast<char**>(names), &op, &full,
                                   &group, &expected_us, &tokens, &bytes, &priority, &deadline, &modes, &snapshot,
                                   &caller))
    return nullptr;
  long wanted = 1;
  if (priority != nullptr) {
    wanted = PyLong_Check(priority) ? PyLong_AsLong(priority) : -1;
    if (wanted < 0 || wanted > 2) {
      PyErr_Clear();
      PyErr_Format(PyExc_ValueError, "priority needs 0, 1 or 2, got %R", priority);
      return nullptr;
    }
  }
  Ticket* self = blank_ticket();
  if (self == nullptr) return nullptr;
  put_new(self->op, op);
  put_new(self->args, full);
  put_new(self->group, group);
  put_new(self->deadline, deadline);
  put_new(self->modes, modes);
  put_new(self->snapshot, snapshot);
  put_new(self->caller, caller);
  self->expected_us = expected_us;
  self->tokens = tokens;
  self->bytes = bytes;
  self->priority = int(wanted);
  PyObject_GC_Track(self);
  return reinterpret_cast<PyObject*>(self);
}

// The error that `error()`, a method of the Python class, makes of how the ticket ended.
void raise_error(Ticket* self) {
  Ref error(PyObject_CallMethod(reinterpret_cast<PyObject*>(self), "error", nullptr));
  if (error) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
}

PyObject* ticket_result(Ticket* self, PyObject*) {
  if (self->state == DONE) return Ref::to(self->value).release();
  raise_error(self);
  return nullptr;
}

PyObject* ticket_await(Ticket* self) {
  self->waiting = 0;
  return Ref::to(reinterpret_cast<PyObject*>(self)).release();
}

PySendResult ticket_send(Ticket* self, PyObject*, PyObject** out) {
  *out = nullptr;
  if (self->state <= RUNNING && !self->waiting) {
    if (self->wake != nullptr && self->wake != Py_None) {
      PyErr_SetString(PyExc_RuntimeError,
                      "a call can be awaited by one task only; await a task around it instead");
      return PYGEN_ERROR;
    }
    self->blocking = self->waiting = 1;
    *out = Ref::to(reinterpret_cast<PyObject*>(self)).release();
    return PYGEN_NEXT;
  }
  self->waiting = 0;
  *out = ticket_result(self, nullptr);
  return *out != nullptr ? PYGEN_RETURN : PYGEN_ERROR;
}

PyObject* ticket_add_done_callback(Ticket* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  if (count != 1 || named > 1 || (named == 1 && PyUnicode_Compare(PyTuple_GET_ITEM(names, 0), known.context))) {
    PyErr_SetString(PyExc_TypeError, "add_done_callback(wake, *, context=None)");
    return nullptr;
  }
  PyObject* context = named == 1 && args[1] != Py_None ? args[1] : nullptr;
  if (self->state > RUNNING) {
    if (self->loop == nullptr) {
      PyErr_SetString(PyExc_RuntimeError, "this call was never submitted");
      return nullptr;
    }
    Ref call(PyObject_GetAttr(self->loop, known.call_soon));
    if (!call) return nullptr;
    PyObject* pass[] = {args[0], reinterpret_cast<PyObject*>(self), context == nullptr ? Py_None : context};
    Ref keywords(PyTuple_Pack(1, known.context));
    if (!keywords) return nullptr;
    Ref handle(PyObject_Vectorcall(call.get(), pass, 2, keywords.get()));
    return handle ? none() : nullptr;
  }
  if (context == nullptr) {
    put(self->context, PyContext_CopyCurrent());
    if (self->context == nullptr) return nullptr;
  } else {
    put_new(self->context, context);
  }
  put_new(self->wake, args[0]);
  return none();
}

// unchanged(): whether torch's modes and stream here are those under which `find` made it.
PyObject* ticket_unchanged(Ticket* self, PyObject*) {
  return PyBool_FromLong(self->surroundings >= 0 && self->surroundings == modes_here() &&
                         on_default_stream(self->place));
}

PyMethodDef ticket_methods[] = {
    method("unchanged", ticket_unchanged, METH_NOARGS, "Whether torch's modes and stream are those under which it was found."),
    method("result", ticket_result, METH_NOARGS, "The value, or the error raised."),
    method("add_done_callback", ticket_add_done_callback, METH_FASTCALL | METH_KEYWORDS,
           "Call `wake(self)` in `context` once it has ended; one waiter only."),
    {nullptr, nullptr, 0, nullptr}};

#define FIELD(name, type, member) {name, type, offsetof(Ticket, member), 0, nullptr}
PyMemberDef ticket_members[] = {FIELD("op", T_OBJECT, op),
                                FIELD("args", T_OBJECT, args),
                                FIELD("batch_key", T_OBJECT, group),
                                FIELD("modes", T_OBJECT, modes),
                                FIELD("caller", T_OBJECT, caller),
                                FIELD("point", T_OBJECT, slot),
                                FIELD("value", T_OBJECT, value),
                                FIELD("wake", T_OBJECT, wake),
                                FIELD("context", T_OBJECT, context),
                                FIELD("driver", T_OBJECT, front),
                                FIELD("_loop", T_OBJECT, loop),
                                FIELD("deadline", T_OBJECT, deadline),
                                FIELD("plan", T_OBJECT, plan),
                                FIELD("snapshot", T_OBJECT, snapshot),
                                FIELD("device", T_OBJECT, device),
                                FIELD("submitted_at", T_DOUBLE, at),
                                FIELD("expected_us", T_DOUBLE, expected_us),
                                FIELD("seq", T_LONGLONG, seq),
                                FIELD("tokens", T_LONGLONG, tokens),
                                FIELD("bytes", T_LONGLONG, bytes),
                                FIELD("state", T_INT, state),
                                FIELD("priority", T_INT, priority),
                                FIELD("_asyncio_future_blocking", T_BOOL, blocking),
                                {"__weaklistoffset__", T_PYSSIZET, offsetof(Ticket, weak), READONLY, nullptr},
                                {nullptr, 0, 0, 0, nullptr}};
#undef FIELD

PyTypeObject* ticket_class() {
  return class_of<Ticket>(
      "layerzero.native.PendingCall", "One call on its way through a lane; layerzero.scheduler.core.pending_call.Ticket.",
      {slot(Py_tp_new, ticket_new), slot(Py_tp_methods, ticket_methods), slot(Py_tp_members, ticket_members),
       slot(Py_tp_iter, PyObject_SelfIter), slot(Py_tp_iternext, next_of<ticket_send, Ticket>),
       slot(Py_am_await, ticket_await), slot(Py_am_send, ticket_send)});
}

// -- a batch of tickets -------------------------------------------------------------------------------

bool all_tickets(PyObject* list) {
  if (!PyList_CheckExact(list)) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i)
    if (!is_ticket(PyList_GET_ITEM(list, i))) return false;
  return PyList_GET_SIZE(list) > 0;
}

// begin(tickets): they run now; (sum of at, least at, tokens, microseconds), or None for others' tickets.
PyObject* begin(PyObject*, PyObject* list) {
  if (!all_tickets(list)) return none();
  double sum = 0, least = HUGE_VAL, us = 0;
  long long tokens = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    auto* ticket = reinterpret_cast<Ticket*>(PyList_GET_ITEM(list, i));
    ticket->state = RUNNING;
    put_new(ticket->slot, Py_None);
    sum += ticket->at;
    least = std::min(least, ticket->at);
    us += ticket->expected_us;
    tokens += ticket->tokens;
  }
  return Py_BuildValue("(ddLd)", sum, least, tokens, us);
}

// land(tickets, outcomes, Failure): they have ended; how many with a value, how many were left by their caller.
PyObject* land(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !all_tickets(args[0]) || !PyList_CheckExact(args[1])) return none();
  PyObject *list = args[0], *outcomes = args[1];
  const Py_ssize_t size = PyList_GET_SIZE(list);
  if (PyList_GET_SIZE(outcomes) != size) return none();
  auto* failed = reinterpret_cast<PyTypeObject*>(args[2]);
  Py_ssize_t values = 0, left = 0;
  for (Py_ssize_t i = 0; i < size; ++i) {
    auto* ticket = reinterpret_cast<Ticket*>(PyList_GET_ITEM(list, i));
    PyObject* outcome = PyList_GET_ITEM(outcomes, i);
    if (ticket->state == DETACHED) {
      ticket->state = CANCELLED;
      ++left;
    } else {
      put_new(ticket->value, outcome);
      const bool broke = Py_TYPE(outcome) == failed;
      ticket->state = broke ? FAILED : DONE;
      values += !broke;
    }
    put_new(ticket->args, known.empty);
  }
  return Py_BuildValue("(nn)", values, left);
}

// Whether it is the wake-up of asyncio's own task. That asks what it waited for for a result, which it drops: the
// coroutine below asks for itself. A future that has ended answers it at once.
bool is_task(PyObject* wake) {
  if (!PyCFunction_CheckExact(wake)) return false;
  PyObject* task = PyCFunction_GET_SELF(wake);
  return task != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(task)) == known.task;
}

// resume(iterator of tickets): wake each in its context; an error leaves the iterator at the next one.
PyObject* resume(PyObject*, PyObject* tickets) {
  if (!PyIter_Check(tickets)) {
    PyErr_Format(PyExc_TypeError, "tickets needs an iterator, got %R", tickets);
    return nullptr;
  }
  while (Ref ticket = Ref(PyIter_Next(tickets))) {
    Ref wake, context;
    if (is_ticket(ticket.get())) {
      auto* self = reinterpret_cast<Ticket*>(ticket.get());
      wake = Ref(std::exchange(self->wake, nullptr));
      context = Ref::to(self->context);
    } else {
      wake = Ref(PyObject_GetAttr(ticket.get(), known.wake));
      if (!wake) return nullptr;
      if (wake.get() != Py_None) {
        context = Ref(PyObject_GetAttr(ticket.get(), known.context));
        if (!context || PyObject_SetAttr(ticket.get(), known.wake, Py_None)) return nullptr;
      }
    }
    if (!wake || wake.get() == Py_None) continue;
    if (!context || !PyContext_CheckExact(context.get())) {
      PyErr_Format(PyExc_TypeError, "a ticket that is waited for needs a context, got %R", ticket.get());
      return nullptr;
    }
    if (PyContext_Enter(context.get())) return nullptr;
    Ref done(PyObject_CallOneArg(wake.get(), is_task(wake.get()) ? known.ended : ticket.get()));
    if (!done) {
      PyObject *type, *value, *trace;
      PyErr_Fetch(&type, &value, &trace);
      PyContext_Exit(context.get());
      PyErr_Restore(type, value, trace);
      return nullptr;
    }
    if (PyContext_Exit(context.get())) return nullptr;
  }
  return PyErr_Occurred() ? nullptr : none();
}

// -- rows ---------------------------------------------------------------------------------------------

// Elements up to which a copy is made without asking torch's dispatcher.
constexpr int64_t SMALL = 4096;

// THPVariable_Check without Python's isinstance, which costs as much as a whole look-up.
bool is_tensor(PyObject* object) {
  return THPVariable_CheckExact(object) ||
         PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

// A tensor that is nothing but memory with sizes and strides; null for every other object.
c10::TensorImpl* plain(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return nullptr;
  c10::TensorImpl* impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
  if (impl == nullptr || impl->layout() != c10::kStrided || impl->has_symbolic_sizes_strides() ||
      !impl->has_storage() || impl->is_nested() ||
      c10::isQIntType(impl->dtype().toScalarType()))
    return nullptr;
  if (impl->key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                                   c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                                   c10::DispatchKey::FuncTorchGradWrapper,
                                                   c10::DispatchKey::Functionalize, c10::DispatchKey::ZeroTensor})))
    return nullptr;
  return impl;
}

// A view of `of`'s memory without a place in any graph: what joins a batch needs no gradient.
at::Tensor view_of(c10::TensorImpl* of, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  auto made = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(of->storage()),
                                                   of->key_set(), of->dtype());
  made->set_sizes_and_strides(sizes, strides, offset);
  return at::Tensor(std::move(made));
}

bool needs_graph(c10::TensorImpl* impl) { return c10::GradMode::is_enabled() && impl->requires_grad(); }

// The tensor whose consecutive row blocks the pieces are; undefined where they are not.
at::Tensor rejoined(const std::vector<c10::TensorImpl*>& pieces) {
  c10::TensorImpl* first = pieces.front();
  const auto strides = first->strides();
  if (strides.empty() || strides[0] == 0) return {};
  const int64_t step = strides[0] * int64_t(first->itemsize());
  // A single row is contiguous whatever its stride; only where the stride says where the next row would stand
  // may contiguous pieces stand for it.
  const bool dense = first->is_contiguous() && strides[0] == c10::multiply_integers(first->sizes().slice(1));
  const char* const start = static_cast<const char*>(first->data());
  const char* expected = start;
  for (c10::TensorImpl* piece : pieces) {
    if (piece->data() != expected || !(dense ? piece->is_contiguous() : piece->strides() == strides)) return {};
    expected += piece->size(0) * step;
  }
  if (pieces.back()->storage().unsafeGetStorageImpl() != first->storage().unsafeGetStorageImpl()) return {};
  c10::SmallVector<int64_t, 5> sizes(first->sizes().begin(), first->sizes().end());
  sizes[0] = (expected - start) / step;
  return view_of(first, sizes, strides, first->storage_offset());
}

// The rows of operand `position` of every call in one tensor; the rows of each go into `counts` where there is
// such a list. NotImplemented unless every operand is plain with one leading axis before `tail` others.
PyObject* gathered(PyObject* calls, Py_ssize_t position, Py_ssize_t tail, PyObject* counts) {
  const Py_ssize_t size = PyList_GET_SIZE(calls);
  if (forward_level()) return not_ours();
  return guarded([&]() -> PyObject* {
    std::vector<c10::TensorImpl*> pieces;
    pieces.reserve(size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* call = PyList_GET_ITEM(calls, i);
      if (!PyTuple_Check(call) || PyTuple_GET_SIZE(call) <= position) return not_ours();
      c10::TensorImpl* impl = plain(PyTuple_GET_ITEM(call, position));
      if (impl == nullptr || impl->dim() != tail + 1 || needs_graph(impl)) return not_ours();
      pieces.push_back(impl);
      if (counts == nullptr) continue;
      PyObject* rows = PyLong_FromLongLong(impl->size(0));
      if (rows == nullptr) return nullptr;
      PyList_SET_ITEM(counts, i, rows);
    }
    at::Tensor joined = rejoined(pieces);
    if (!joined.defined()) {
      std::vector<at::Tensor> tensors;
      tensors.reserve(size);
      for (Py_ssize_t i = 0; i < size; ++i)
        tensors.push_back(THPVariable_Unpack(PyTuple_GET_ITEM(PyList_GET_ITEM(calls, i), position)));
      const Unlocked unlocked;
      joined = at::cat(tensors);
    }
    return THPVariable_Wrap(std::move(joined));
  });
}

// gather(calls, position, tail): the rows of that operand of every call in one tensor, and how many each brings.
// NotImplemented unless every operand is plain with one leading axis.
PyObject* gather(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyList_CheckExact(args[0])) return not_ours();
  const Py_ssize_t position = PyLong_AsSsize_t(args[1]), tail = PyLong_AsSsize_t(args[2]);
  if (PyErr_Occurred()) return nullptr;
  if (PyList_GET_SIZE(args[0]) == 0 || position < 0) return not_ours();
  Ref counts(PyList_New(PyList_GET_SIZE(args[0])));
  if (!counts) return nullptr;
  Ref whole(gathered(args[0], position, tail, counts.get()));
  if (!whole) return nullptr;
  return whole.get() == Py_NotImplemented ? whole.release() : PyTuple_Pack(2, whole.get(), counts.get());
}

// rejoin(tensors): the base, None where they are not its pieces, NotImplemented where it cannot tell.
PyObject* rejoin(PyObject*, PyObject* list) {
  if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) == 0 || forward_level()) return not_ours();
  return guarded([&]() -> PyObject* {
    std::vector<c10::TensorImpl*> pieces;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
      c10::TensorImpl* impl = plain(PyList_GET_ITEM(list, i));
      if (impl == nullptr || needs_graph(impl)) return not_ours();
      pieces.push_back(impl);
    }
    at::Tensor joined = rejoined(pieces);
    return joined.defined() ? THPVariable_Wrap(std::move(joined)) : none();
  });
}

// split(tensor, counts, lift): views of that many rows each, behind one another, with an axis of one in front
// where `lift`; NotImplemented for no plain tensor.
PyObject* split(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyList_CheckExact(args[1]) || forward_level()) return not_ours();
  c10::TensorImpl* impl = plain(args[0]);
  if (impl == nullptr || impl->dim() == 0 || needs_graph(impl)) return not_ours();
  const int lift = PyObject_IsTrue(args[2]) ? 1 : 0;
  const Py_ssize_t size = PyList_GET_SIZE(args[1]);
  return guarded([&]() -> PyObject* {
    c10::SmallVector<int64_t, 6> sizes(impl->sizes().begin(), impl->sizes().end());
    c10::SmallVector<int64_t, 6> strides(impl->strides().begin(), impl->strides().end());
    const int64_t rows = sizes[0], step = strides[0];
    if (lift) {
      sizes.insert(sizes.begin(), 1);
      strides.insert(strides.begin(), 0);
    }
    Ref made(PyList_New(size));
    if (!made) return nullptr;
    int64_t at = 0;
    for (Py_ssize_t i = 0; i < size; ++i) {
      const int64_t take = PyLong_AsLongLong(PyList_GET_ITEM(args[1], i));
      if (take < 0 || take > rows - at) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "counts need to be %lld rows", (long long)rows);
        return nullptr;
      }
      sizes[lift] = take;
      if (lift) strides[0] = take * step;
      PyObject* piece = THPVariable_Wrap(view_of(impl, sizes, strides, impl->storage_offset() + at * step));
      if (piece == nullptr) return nullptr;
      PyList_SET_ITEM(made.get(), i, piece);
      at += take;
    }
    if (at != rows) {
      PyErr_Format(PyExc_ValueError, "counts need to be %lld rows, got %lld", (long long)rows, (long long)at);
      return nullptr;
    }
    return made.release();
  });
}

// own(tensor): a detached copy of what is a piece of a larger allocation on the CPU; NotImplemented for all else.
PyObject* own(PyObject*, PyObject* object) {
  c10::TensorImpl* impl = plain(object);
  if (impl == nullptr || !impl->device().is_cpu() ||
      impl->storage().nbytes() <= size_t(impl->numel()) * impl->itemsize())
    return not_ours();
  return guarded([&] {
    if (!impl->is_contiguous() || impl->numel() > SMALL)
      return THPVariable_Wrap(THPVariable_Unpack(object).detach().clone(at::MemoryFormat::Contiguous));
    at::Tensor copy = at::detail::empty_cpu(impl->sizes(), impl->dtype().toScalarType());
    std::memcpy(copy.mutable_data_ptr(), impl->data(), size_t(impl->numel()) * impl->itemsize());
    return THPVariable_Wrap(std::move(copy));
  });
}

// product(x, weight): the rows of x times the transposed matrix, as torch's linear gives it, in one operator of torch;
// NotImplemented for what is no dense pair of rows and a matrix that needs no gradient.
PyObject* product(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || modes_here() < 0 || forward_level()) return not_ours();
  c10::TensorImpl *rows = plain(args[0]), *weight = plain(args[1]);
  if (rows == nullptr || weight == nullptr || weight->dim() != 2 || rows->dim() < 2 || !rows->is_contiguous() ||
      rows->dtype() != weight->dtype() || rows->device() != weight->device() || rows->numel() == 0 ||
      weight->numel() == 0 || rows->size(-1) != weight->size(1) || needs_graph(rows) || needs_graph(weight))
    return not_ours();
  return guarded([&] {
    const int64_t width = weight->size(1), height = weight->size(0), all = rows->numel() / width;
    c10::SmallVector<int64_t, 6> sizes(rows->sizes().begin(), rows->sizes().end());
    sizes.back() = height;
    at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor out = at::empty(sizes, THPVariable_Unpack(args[0]).options().requires_grad(false));
    at::Tensor flat = view_of(out.unsafeGetTensorImpl(), {all, height}, {height, 1}, out.storage_offset());
    const at::Tensor left = view_of(rows, {all, width}, {width, 1}, rows->storage_offset());
    const at::Tensor right =
        view_of(weight, {width, height}, {weight->stride(1), weight->stride(0)}, weight->storage_offset());
    {
      const Unlocked unlocked;
      at::mm_out(flat, left, right);
    }
    return THPVariable_Wrap(std::move(out));
  });
}

// paired(values, plan): [(value, plan), ...].
PyObject* paired(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_CheckExact(args[0])) return not_ours();
  const Py_ssize_t size = PyList_GET_SIZE(args[0]);
  Ref made(PyList_New(size));
  if (!made) return nullptr;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* pair = PyTuple_Pack(2, PyList_GET_ITEM(args[0], i), args[1]);
    if (pair == nullptr) return nullptr;
    PyList_SET_ITEM(made.get(), i, pair);
  }
  return made.release();
}

#include "indices.h"

constexpr Py_ssize_t MAX_PARAMETERS = 32;

#include "numbers.h"

// -- memo ---------------------------------------------------------------------------------------------

constexpr size_t MAX_KEY = 2048, MAX_ENTRIES = 16384;

// A key under construction: 64-bit words.
struct Key {
  uint64_t words[MAX_KEY / 8];
  size_t size = 0;
  bool add(uint64_t word) {
    if (size == MAX_KEY / 8) return false;
    words[size++] = word;
    return true;
  }
  std::string_view view() const { return {reinterpret_cast<const char*>(words), size * 8}; }
};

struct Hash {
  using is_transparent = void;
  size_t operator()(std::string_view key) const {
    uint64_t hash = key.size();
    for (size_t i = 0; i + 8 <= key.size(); i += 8) {
      uint64_t word;
      std::memcpy(&word, key.data() + i, 8);
      hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 29;
    }
    return hash;
  }
  size_t operator()(const std::string& key) const { return (*this)(std::string_view(key)); }
};

// What is remembered under keys. An entry that is replaced dies after the map is whole again.
template <typename T>
using Table = std::unordered_map<std::string, T, Hash, std::equal_to<>>;

template <typename T>
void remember(Table<T>& table, const Key& key, T entry) {
  std::swap(table.try_emplace(std::string(key.view())).first->second, entry);
}

struct Entry {
  Ref plan, group, modes, constants;  // constants: values by position, NULL where the call's own tensor stands
  double expected_us;
  long long tokens, bytes;
  int place;
};

struct Remembered {
  Ref devices, device, snapshot, fronts;
  uint64_t shared = 0;  // positions whose memory is part of the key
  Loop last_loop;       // the loop that asked last
  Table<Entry> entries;
};

// What the two caches of awaited calls have alike: what `Call` (calls.h) needs of one.
struct Awaited {
  PyObject_HEAD
  PyObject *subject, *active, *scope;  // the op, or the batched function
  PyObject *last, *restore;            // what notes a thread's last plan, and what puts modes back in force
  PyObject* follow;                    // Python's coroutine function of a call: of a ticket that is found, or from anew
};

struct Memo : Awaited {
  PyObject *names, *defaults, *rehearsal, *validate;
  Py_ssize_t positional;
  unsigned long long hits;  // calls it has found
  Remembered* kept;

  template <typename F>
  void each(F&& visit) {
    all_of(visit, subject, active, scope, last, restore, follow, names, defaults, rehearsal, validate);
  }
  template <typename F>
  void inside(F&& visit) const {
    for (const Ref* ref : {&kept->devices, &kept->device, &kept->snapshot, &kept->fronts, &kept->last_loop.loop}) visit(ref->get());
    for (const auto& [key, entry] : kept->entries)
      for (const Ref* ref : {&entry.plan, &entry.group, &entry.modes, &entry.constants}) visit(ref->get());
  }
  void drop() {  // its objects die after it is empty
    std::unique_ptr<Remembered> old(std::exchange(kept, new Remembered()));
    kept->shared = old->shared;
  }
  void end() { delete kept; }
};

PyTypeObject* MemoType = nullptr;

// What one value adds to a key; false for a value that cannot be told apart by bits.
bool add_value(Key& key, PyObject* value, bool shared) {
  if (c10::TensorImpl* impl = plain(value)) {
    const auto sizes = impl->sizes(), strides = impl->strides();
    const uint64_t kind = 1 | uint64_t(shared) << 8 | uint64_t(impl->requires_grad()) << 9 | uint64_t(sizes.size()) << 16 |
                          uint64_t(uint16_t(impl->dtype().toScalarType())) << 32 |
                          uint64_t(uint8_t(impl->device().index())) << 48;
    if (key.size + 3 + 2 * sizes.size() > MAX_KEY / 8) return false;
    key.add(kind);
    key.add(impl->key_set().raw_repr());
    if (shared) key.add(reinterpret_cast<uint64_t>(impl->data()));
    for (const int64_t extent : sizes) key.add(uint64_t(extent));
    for (const int64_t stride : strides) key.add(uint64_t(stride));
    return true;
  }
  if (value == Py_None) return key.add(2);
  if (PyBool_Check(value)) return key.add(value == Py_True ? 4 : 3);
  if (PyLong_CheckExact(value)) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return !overflow && key.add(5) && key.add(uint64_t(number));
  }
  if (PyFloat_CheckExact(value)) {
    const double number = PyFloat_AS_DOUBLE(value);
    uint64_t bits;
    std::memcpy(&bits, &number, 8);
    return number == number && key.add(6) && key.add(bits);
  }
  if (PyUnicode_CheckExact(value)) {
    Py_ssize_t size;
    const char* text = PyUnicode_AsUTF8AndSize(value, &size);
    if (text == nullptr) {
      PyErr_Clear();
      return false;
    }
    if (size > 256 || !key.add(7 | uint64_t(size) << 8)) return false;
    for (Py_ssize_t at = 0; at < size; at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, text + at, std::min<Py_ssize_t>(8, size - at));
      if (!key.add(word)) return false;
    }
    return true;
  }
  if (THPDtype_Check(value))
    return key.add(8 | uint64_t(uint16_t(reinterpret_cast<THPDtype*>(value)->scalar_type)) << 8);
  if (PyTuple_CheckExact(value)) {
    if (!key.add(9 | uint64_t(PyTuple_GET_SIZE(value)) << 8)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      PyObject* item = PyTuple_GET_ITEM(value, i);
      if (THPVariable_CheckExact(item) || !add_value(key, item, false)) return false;
    }
    return true;
  }
  return false;
}

// The call's values in the order of the parameters; null where the default stands. False: not callable so.
template <typename Self>  // with names, defaults, positional
bool bind(const Self* self, PyObject* args, PyObject* kwargs, PyObject** values) {
  const Py_ssize_t all = PyTuple_GET_SIZE(self->names), given = PyTuple_GET_SIZE(args);
  if (given > self->positional) return false;
  for (Py_ssize_t i = 0; i < all; ++i) values[i] = i < given ? PyTuple_GET_ITEM(args, i) : nullptr;
  Py_ssize_t at = 0;
  PyObject *name, *value;
  while (kwargs != nullptr && PyDict_Next(kwargs, &at, &name, &value)) {
    Py_ssize_t i = given;
    while (i < all && PyTuple_GET_ITEM(self->names, i) != name) ++i;  // both are interned
    if (i == all) return false;
    values[i] = value;
  }
  for (Py_ssize_t i = given; i < all; ++i)
    if (values[i] == nullptr && PyTuple_GET_ITEM(self->defaults, i) == Py_Ellipsis) return false;
  return true;
}

// The values of a full argument tuple, Ellipsis where a tensor of the call stands; None where the op made a tensor of
// what it was given.
PyObject* constants_of(PyObject* full, PyObject* const* values) {
  const Py_ssize_t all = PyTuple_GET_SIZE(full);
  Ref constants(PyTuple_New(all));
  if (!constants) return nullptr;
  for (Py_ssize_t i = 0; i < all; ++i) {
    PyObject* value = PyTuple_GET_ITEM(full, i);
    const bool tensor = THPVariable_CheckExact(value);
    if (tensor && value != values[i]) return none();
    PyTuple_SET_ITEM(constants.get(), i, Ref::to(tensor ? Py_Ellipsis : value).release());
  }
  return constants.release();
}

// The names of an op's parameters, interned, as every keyword of a call is.
PyObject* interned(PyObject* names, PyObject* defaults) {
  if (PyTuple_GET_SIZE(names) > MAX_PARAMETERS || PyTuple_GET_SIZE(defaults) != PyTuple_GET_SIZE(names)) {
    PyErr_Format(PyExc_ValueError, "a memo needs one default a name and at most %zd names", MAX_PARAMETERS);
    return nullptr;
  }
  Ref own(PyTuple_New(PyTuple_GET_SIZE(names)));
  if (!own) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    PyObject* name = Ref::to(PyTuple_GET_ITEM(names, i)).release();
    PyUnicode_InternInPlace(&name);
    PyTuple_SET_ITEM(own.get(), i, name);
  }
  return own.release();
}

bool make_key(const Memo* self, int modes, PyObject* const* values, Key& key) {
  key.add(uint64_t(modes));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->names); ++i)
    if (values[i] == nullptr ? !key.add(0) : !add_value(key, values[i], self->kept->shared >> i & 1)) return false;
  return true;
}

// Whether what was remembered still holds: the same runtime, the same generation of its device.
bool valid(Remembered* kept, PyObject* active) {
  if (!kept->devices) return false;
  Ref devices(PyObject_GetAttr(active, known.devices));
  Ref snapshot(PyObject_GetAttr(kept->device.get(), known.snapshot));
  PyErr_Clear();
  return devices.get() == kept->devices.get() && snapshot.get() == kept->snapshot.get();
}

// Whether an entry's device is as it was: nothing is captured there, and no capture is being rehearsed.
template <typename Self>  // with rehearsal
bool usual(const Self* self, int place) {
  if (place == HOST) return true;
  if (!on_default_stream(place)) return false;
  Ref on(PyObject_GetAttr(self->rehearsal, known.on));
  PyErr_Clear();
  return on.get() == Py_False;
}

// The modes that a call here is remembered under; negative where nothing that is known applies. An error is set or not.
template <typename Self>  // with scope
int modes_of_call(const Self* self) {
  const int modes = modes_here();
  if (modes < 0 || forward_level()) return -1;
  PyObject* scope = nullptr;
  if (PyContextVar_Get(self->scope, nullptr, &scope)) return -1;
  Ref held(scope);
  return scope != nullptr && scope != Py_None ? -1 : modes;
}

// at_once.h
Ref costs_at_once(PyObject* front, PyObject* loop, PyObject* key);
double alone_us_of(PyObject* costs);
bool alone_runs(PyObject* front, PyObject* loop, double expected_us);
void add_inline(PyObject* front, double us);
PyObject* value_by_plan(PyObject* plan, PyObject* device, PyObject* const* values, Py_ssize_t count, PyObject* last);

// The ticket of a call that is known; empty for any other, an error is set or not. Where `ran` is given, a call that needs no
// queue runs, `ran` is set, and it is the value.
Ref found(Memo* self, PyObject* args, PyObject* kwargs, bool* ran) {
  if (self->kept->entries.empty()) return Ref();
  const int modes = modes_of_call(self);
  if (modes < 0 || hooked(modes)) return Ref();
  if (!valid(self->kept, self->active)) {
    self->drop();
    return Ref();
  }
  Ref loop = loop_here(self->kept->last_loop);
  if (!loop) return Ref();  // Python says what that needs
  Ref front = Ref::to(PyDict_GetItemWithError(self->kept->fronts.get(), loop.get()));
  if (!front) return Ref();
  PyObject* values[MAX_PARAMETERS];
  Key key;
  if (!bind(self, args, kwargs, values) || !make_key(self, modes | switches_here(), values, key)) return Ref();
  const auto found = self->kept->entries.find(key.view());
  if (found == self->kept->entries.end()) return Ref();
  // References of our own before anything is made: a collection may run code that forgets the entry.
  const Entry& entry = found->second;
  Ref plan = Ref::to(entry.plan.get()), group = Ref::to(entry.group.get()), around = Ref::to(entry.modes.get());
  Ref constants = Ref::to(entry.constants.get()), device = Ref::to(self->kept->device.get());
  const double expected_us = entry.expected_us;
  const long long tokens = entry.tokens, bytes = entry.bytes;
  const int place = entry.place;
  if (!usual(self, place)) return Ref();
  ++self->hits;
  const Py_ssize_t all = PyTuple_GET_SIZE(self->names);
  if (ran != nullptr && place == HOST) {
    const bool alone = alone_runs(front.get(), loop.get(), expected_us);
    PyObject* key = group.get() == Py_None ? self->subject : group.get();
    Ref costs = alone ? Ref() : costs_at_once(front.get(), loop.get(), key);
    if (alone || costs) {
      for (Py_ssize_t i = 0; i < all; ++i) {
        PyObject* constant = PyTuple_GET_ITEM(constants.get(), i);
        if (constant != Py_Ellipsis) values[i] = constant;
      }
      *ran = true;
      if (alone) add_inline(front.get(), expected_us);
      Ref value(value_by_plan(plan.get(), device.get(), values, all, self->last));
      if (value && costs) add_inline(front.get(), alone_us_of(costs.get()));
      return value;
    }
  }
  Ref full(PyTuple_New(all));
  if (!full) return Ref();
  for (Py_ssize_t i = 0; i < all; ++i) {
    PyObject* constant = PyTuple_GET_ITEM(constants.get(), i);
    PyTuple_SET_ITEM(full.get(), i, Ref::to(constant == Py_Ellipsis ? values[i] : constant).release());
  }
  Ticket* ticket = blank_ticket();
  if (ticket == nullptr) return Ref();
  ticket->op = Ref::to(self->subject).release();
  ticket->args = full.release();
  ticket->group = group.release();
  ticket->modes = around.release();
  ticket->plan = plan.release();
  ticket->device = device.release();
  ticket->front = front.release();
  ticket->loop = loop.release();
  ticket->expected_us = expected_us;
  ticket->tokens = tokens;
  ticket->bytes = bytes;
  ticket->surroundings = modes;
  ticket->place = place;
  PyObject_GC_Track(ticket);
  return Ref(reinterpret_cast<PyObject*>(ticket));
}

// find(args, kwargs): the ticket of a call that is known, with its front; None for any other.
PyObject* memo_find(Memo* self, PyObject* const* given, Py_ssize_t count) {
  if (count != 2) return none();
  return guarded([&]() -> PyObject* {
    Ref ticket = found(self, given[0], given[1], nullptr);
    if (!ticket) return PyErr_Occurred() ? nullptr : none();
    return ticket.release();
  });
}

PyObject* memo_call(Memo* self, PyObject* const* given, Py_ssize_t count);

// remember(args, kwargs, full, shared, (devices, device, snapshot, fronts), plan, group, modes, tokens, bytes,
// expected_us): whether `find` will know such a call.
PyObject* memo_remember(Memo* self, PyObject* given) {
  PyObject *args, *kwargs, *full, *shared, *devices, *device, *snapshot, *fronts, *plan, *group, *modes;
  long long tokens, bytes;
  double expected_us;
  if (!PyArg_ParseTuple(given, "O!O!O!O!(OOOO!)OOOLLd", &PyTuple_Type, &args, &PyDict_Type, &kwargs, &PyTuple_Type,
                        &full, &PyTuple_Type, &shared, &devices, &device, &snapshot, &PyDict_Type, &fronts, &plan,
                        &group, &modes, &tokens, &bytes, &expected_us))
    return nullptr;
  const int here = modes_here();
  const Py_ssize_t all = PyTuple_GET_SIZE(self->names);
  PyObject* values[MAX_PARAMETERS];
  if (here < 0 || PyTuple_GET_SIZE(full) != all || !bind(self, args, kwargs, values)) Py_RETURN_FALSE;
  const c10::TensorImpl* first = all > 0 ? plain(PyTuple_GET_ITEM(full, 0)) : nullptr;
  const int place = first == nullptr ? ELSEWHERE : place_of(first);
  if (place == ELSEWHERE || !usual(self, place)) Py_RETURN_FALSE;
  uint64_t positions = self->kept->shared;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shared); ++i) {
    const Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GET_ITEM(shared, i));
    if (position < 0 || position >= all) Py_RETURN_FALSE;
    positions |= uint64_t(1) << position;
  }
  Ref constants(constants_of(full, values));
  if (!constants) return nullptr;
  if (constants.get() == Py_None) Py_RETURN_FALSE;
  return guarded([&]() -> PyObject* {
    Remembered* kept = self->kept;
    if (positions != kept->shared || kept->entries.size() >= MAX_ENTRIES || devices != kept->devices.get() ||
        device != kept->device.get() || snapshot != kept->snapshot.get() || fronts != kept->fronts.get()) {
      self->drop();
      kept = self->kept;
      kept->shared = positions;
      kept->devices = Ref::to(devices);
      kept->device = Ref::to(device);
      kept->snapshot = Ref::to(snapshot);
      kept->fronts = Ref::to(fronts);
    }
    Key key;
    if (!make_key(self, here | switches_here(), values, key)) Py_RETURN_FALSE;
    remember(kept->entries, key, Entry{Ref::to(plan), Ref::to(group), Ref::to(modes), std::move(constants),
                                       expected_us,   tokens,         bytes,          place});
    Py_RETURN_TRUE;
  });
}

PyObject* memo_forget(Memo* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    self->drop();
    return none();
  });
}

PyObject* memo_new(PyTypeObject* type, PyObject* given, PyObject*) {
  PyObject *op, *names, *defaults, *active, *scope, *rehearsal, *last, *restore, *follow, *validate;
  Py_ssize_t positional;
  if (!PyArg_ParseTuple(given, "OO!O!nOOOOOOO", &op, &PyTuple_Type, &names, &PyTuple_Type, &defaults, &positional, &active,
                        &scope, &rehearsal, &last, &restore, &follow, &validate))
    return nullptr;
  Ref own(interned(names, defaults));
  if (!own) return nullptr;
  auto* self = made<Memo>(type, {op, active, scope, last, restore, follow, own.get(), defaults, rehearsal, validate});
  if (self == nullptr) return nullptr;
  self->positional = positional;
  self->hits = 0;
  self->kept = new Remembered();
  PyObject_GC_Track(self);
  return reinterpret_cast<PyObject*>(self);
}

PyObject* memo_size(Memo* self, void*) { return PyLong_FromSize_t(self->kept->entries.size()); }

PyMethodDef memo_methods[] = {
    method("call", memo_call, METH_FASTCALL, "What awaits the op with these arguments."),
    method("find", memo_find, METH_FASTCALL, "The ticket of a known call, or None."),
    method("remember", memo_remember, METH_VARARGS, "Whether `find` will know such a call."),
    method("forget", memo_forget, METH_NOARGS, "Drop everything."),
    {nullptr, nullptr, 0, nullptr}};
PyObject* memo_hits(Memo* self, void*) { return PyLong_FromUnsignedLongLong(self->hits); }
PyGetSetDef memo_getset[] = {{"size", reinterpret_cast<getter>(memo_size), nullptr, "Calls it knows.", nullptr},
                             {"hits", reinterpret_cast<getter>(memo_hits), nullptr, "How often it was asked for one it knew.", nullptr},
                             {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject* memo_class() {
  return class_of<Memo>("layerzero.native.CallCache", "What is known about the calls of one op.",
                        {slot(Py_tp_new, memo_new), slot(Py_tp_methods, memo_methods), slot(Py_tp_getset, memo_getset)});
}

// -- batched functions, and the way into the queue ----------------------------------------------------------

#include "plans.h"
#include "operators.h"
#include "rows.h"
#include "functions.h"
#include "queue.h"
#include "at_once.h"
#include "carried.h"
#include "calls.h"

// -- the module ---------------------------------------------------------------------------------------

// modes(): the mask of grad, inference and deterministic mode, or -1 where anything else is in force.
PyObject* modes(PyObject*, PyObject*) { return PyLong_FromLong(modes_here()); }

PyMethodDef functions[] = {
    method("begin", begin, METH_O, "Tickets run now: (sum of at, least at, tokens, microseconds)."),
    method("land", land, METH_FASTCALL, "Tickets have ended."),
    method("resume", resume, METH_O, "Wake the tickets of an iterator, each in its context."),
    method("rejoin", rejoin, METH_O, "The tensor that pieces are consecutive rows of."),
    method("gather", gather, METH_FASTCALL, "All rows of one operand, and how many each call brings."),
    method("split", split, METH_FASTCALL, "Views of rows."),
    method("product", product, METH_FASTCALL, "Rows times a transposed matrix."),
    method("own", own, METH_O, "A copy by itself of a piece of a larger allocation."),
    method("columns", columns, METH_O, "Rows of each call, and the calls' arguments as columns."),
    method("attributes", attributes, METH_VARARGS, "The classes of a lane, whose attributes `queue` reads and writes."),
    method("queue", queue, METH_FASTCALL, "Whether the ticket was queued."),
    method("paired", paired, METH_FASTCALL, "Each value with a plan."),
    method("ids_below", ids_below, METH_FASTCALL, "A copy of ids that are in range."),
    method("offsets_to", offsets_to, METH_FASTCALL, "A copy of offsets that rise from 0 to an end."),
    method("places_below", places_below, METH_FASTCALL, "A copy of places that are in range, none twice."),
    method("pages_of", pages_of, METH_FASTCALL, "Copies of a table of pages and of the lengths that it holds."),
    method("rows_within", rows_within, METH_FASTCALL, "The arguments of a draw, with copies of the numbers of each row."),
    method("proposals", proposals, METH_O, "The arguments of a verification, with a copy of the drafted tokens."),
    method("carries", carries, METH_NOARGS, "Whether the coroutine that runs here has modes of its own."),
    method("modes", modes, METH_NOARGS, "The mask of torch's modes, or -1."),
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "layerzero_hot", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_layerzero_hot() {
  const std::pair<PyObject**, const char*> names[] = {
      {&known.devices, "devices"}, {&known.snapshot, "snapshot"}, {&known.context, "context"}, {&known.on, "on"},
      {&known.wake, "wake"}, {&known.call_soon, "call_soon"}, {&known.plan, "plan"}, {&known.call, "call"}, {&known.name, "name"},
      {&known.us_per_row, "us_per_row"}, {&known.current_level, "_current_level"}, {&known.thread_id, "_thread_id"}};
  for (const auto& [name, text] : names)
    if ((*name = PyUnicode_InternFromString(text)) == nullptr) return nullptr;
  known.empty = PyTuple_New(0);
  Ref events(PyImport_ImportModule("asyncio"));
  Ref forward(PyImport_ImportModule("torch.autograd.forward_ad"));
  if (!events || !forward) return nullptr;
  known.forward = Ref::to(PyModule_GetDict(forward.get())).release();
  known.running_loop = PyObject_GetAttrString(events.get(), "get_running_loop");
  Ref module(PyModule_Create(&definition));
  pthread_atfork(nullptr, nullptr, [] { ++forks; });
  if (known.running_loop == nullptr || !know_tasks(events.get()) || !module) return nullptr;
  if ((CallType = call_class()) == nullptr) return nullptr;  // made by `FunctionCache.call` alone
  const std::pair<PyTypeObject**, PyTypeObject* (*)()> classes[] = {
      {&TicketType, ticket_class}, {&MemoType, memo_class},         {&PlansType, plans_class},    {&BatchPlansType, batches_class},
      {&KindsType, kinds_class},     {&OperatorType, operator_class}, {&CarriedType, carried_class}};
  for (const auto& [type, make] : classes)
    if ((*type = make()) == nullptr || PyModule_AddType(module.get(), *type)) return nullptr;
  return module.release();
}
