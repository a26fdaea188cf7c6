// The journal's twin of `RunningKernelLog.watched`: a callable that notes its kernel in a slot of the thread while it runs.
//
// A slot is two words of memory that outlives the process: the number of the kernel, and when it began on the
// monotonic clock, in nanoseconds; 0 when it has ended.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#ifdef Py_GIL_DISABLED
#error "this module counts on the lock of the interpreter"
#endif

#include <atomic>
#include <cstdint>
#include <ctime>

namespace {

using Word = std::atomic<uint64_t>;
static_assert(sizeof(Word) == sizeof(uint64_t) && Word::is_always_lock_free);

struct Watched {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *call, *slot_of;  // what runs, and where the thread's slot begins: an index of words
  Py_buffer words;
  uint64_t number, journal;
};

// The slot that this thread had in the journal it noted something in last.
struct Known {
  uint64_t journal = 0;
  Word* slot = nullptr;
};
thread_local Known known;

uint64_t now() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return uint64_t(at.tv_sec) * 1000000000u + uint64_t(at.tv_nsec);
}

Word* claimed(Watched* self) {
  PyObject* index = PyObject_CallNoArgs(self->slot_of);
  if (index == nullptr) return nullptr;
  const long long at = PyLong_AsLongLong(index);
  Py_DECREF(index);
  if (at < 0 || (at + 2) * Py_ssize_t(sizeof(Word)) > self->words.len) {
    if (!PyErr_Occurred()) PyErr_Format(PyExc_IndexError, "a slot needs a place in the journal, got %lld", at);
    return nullptr;
  }
  known = {self->journal, static_cast<Word*>(self->words.buf) + at};
  return known.slot;
}

PyObject* noted(PyObject* callable, PyObject* const* args, size_t count, PyObject* names) {
  auto* self = reinterpret_cast<Watched*>(callable);
  Word* slot = known.journal == self->journal ? known.slot : claimed(self);
  if (slot == nullptr) return nullptr;
  slot[0].store(self->number, std::memory_order_relaxed);
  slot[1].store(now(), std::memory_order_release);
  PyObject* result = PyObject_Vectorcall(self->call, args, count, names);
  slot[1].store(0, std::memory_order_release);
  return result;
}

int watched_traverse(Watched* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(self->call);
  Py_VISIT(self->slot_of);
  return 0;
}

int watched_clear(Watched* self) {
  Py_CLEAR(self->call);
  Py_CLEAR(self->slot_of);
  return 0;
}

void watched_dealloc(Watched* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  watched_clear(self);
  PyBuffer_Release(&self->words);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyMemberDef watched_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Watched, vectorcall), READONLY, nullptr},
    {"__wrapped__", T_OBJECT, offsetof(Watched, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot watched_slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_traverse, reinterpret_cast<void*>(watched_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(watched_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(watched_dealloc)},
    {Py_tp_members, watched_members},
    {0, nullptr},
};

PyType_Spec watched_spec = {
    "layerzero_noting.Watched", sizeof(Watched), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    watched_slots,
};

PyTypeObject* WatchedType = nullptr;

// watched(call, number, words, journal, slot_of): `call`, noted as kernel `number` of `journal` while it runs.
PyObject* watched(PyObject*, PyObject* given) {
  PyObject *call, *words, *slot_of;
  unsigned long long number, journal;
  if (!PyArg_ParseTuple(given, "OKOKO", &call, &number, &words, &journal, &slot_of)) return nullptr;
  auto* self = PyObject_GC_New(Watched, WatchedType);
  if (self == nullptr) return nullptr;
  self->vectorcall = noted;
  self->call = Py_NewRef(call);
  self->slot_of = Py_NewRef(slot_of);
  self->number = number;
  self->journal = journal;
  if (PyObject_GetBuffer(words, &self->words, PyBUF_WRITABLE)) {
    self->words.obj = nullptr;  // nothing to release
    Py_DECREF(self);
    return nullptr;
  }
  PyObject_GC_Track(self);
  return reinterpret_cast<PyObject*>(self);
}

PyMethodDef functions[] = {
    {"watched", watched, METH_VARARGS, "A callable, noted in the journal while it runs."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "layerzero_noting", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_layerzero_noting() {
  WatchedType = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&watched_spec));
  return WatchedType == nullptr ? nullptr : PyModule_Create(&definition);
}
