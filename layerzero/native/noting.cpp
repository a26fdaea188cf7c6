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
#include <initializer_list>
#include <vector>

namespace {

#include "classes.h"

using Word = std::atomic<uint64_t>;
static_assert(sizeof(Word) == sizeof(uint64_t) && Word::is_always_lock_free);

struct Watched {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *call, *slot_of;  // what runs, and where the thread's slot begins: an index of words
  Py_buffer words;
  uint64_t number, journal;

  template <typename F>
  void each(F&& visit) {
    all_of(visit, call, slot_of);
  }
  void end() { PyBuffer_Release(&words); }
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

PyMemberDef watched_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Watched, vectorcall), READONLY, nullptr},
    {"__wrapped__", T_OBJECT, offsetof(Watched, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyTypeObject* WatchedType = nullptr;

// watched(call, number, words, journal, slot_of): `call`, noted as kernel `number` of `journal` while it runs.
PyObject* watched(PyObject*, PyObject* given) {
  PyObject *call, *words, *slot_of;
  unsigned long long number, journal;
  if (!PyArg_ParseTuple(given, "OKOKO", &call, &number, &words, &journal, &slot_of)) return nullptr;
  auto* self = made<Watched>(WatchedType, {call, slot_of});
  if (self == nullptr) return nullptr;
  self->vectorcall = noted;
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
    method("watched", watched, METH_VARARGS, "A callable, noted in the journal while it runs."),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "layerzero_noting", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_layerzero_noting() {
  WatchedType = class_of<Watched>("layerzero_noting.Watched", "A callable, noted in the journal while it runs.",
                                  {slot(Py_tp_call, PyVectorcall_Call), slot(Py_tp_members, watched_members)},
                                  Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION);
  return WatchedType == nullptr ? nullptr : PyModule_Create(&definition);
}
