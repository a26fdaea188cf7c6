// What the classes of the compiled modules have alike.
//
// An object has references: `each` calls `visit` with every one of them. `inside` does so with those in what it
// remembers; `end` frees that. `drop` is what a collection does to break a ring. One that has a finalizer says by
// `unfinished` whether it is still to run.

#pragma once

template <typename F, typename... Field>
void all_of(F&& visit, Field&... fields) {
  (visit(fields), ...);
}

template <typename T>
int traverse(T* self, visitproc visit, void* arg) {
  int stopped = 0;
  const auto visited = [&](PyObject* object) {
    if (object != nullptr && stopped == 0) stopped = visit(object, arg);
  };
  visited(reinterpret_cast<PyObject*>(Py_TYPE(self)));
  self->each(visited);
  if constexpr (requires { self->inside(visited); }) self->inside(visited);
  return stopped;
}

template <typename T>
void clear_fields(T* self) {
  self->each([](PyObject*& field) { Py_CLEAR(field); });
}

template <typename T>
int clear(T* self) {
  if constexpr (requires { self->drop(); })
    self->drop();
  else
    clear_fields(self);
  return 0;
}

template <typename T>
void dealloc(T* self) {
  auto* object = reinterpret_cast<PyObject*>(self);
  PyTypeObject* type = Py_TYPE(self);
  if constexpr (requires { self->unfinished(); })
    if (self->unfinished() && PyObject_CallFinalizerFromDealloc(object)) return;
  PyObject_GC_UnTrack(self);
  if constexpr (requires { self->weak; })
    if (self->weak != nullptr) PyObject_ClearWeakRefs(object);
  if constexpr (requires { self->end(); }) self->end();
  clear_fields(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

// A new object of a class with these references, in the order of `each`; it is tracked by who has filled the rest.
template <typename T>
T* made(PyTypeObject* type, std::initializer_list<PyObject*> references) {
  auto* self = PyObject_GC_New(T, type);
  auto next = references.begin();
  if (self != nullptr) self->each([&](PyObject*& field) { field = Py_XNewRef(*next++); });
  return self;
}

template <typename F>
PyType_Slot slot(int number, F* what) {
  return {number, reinterpret_cast<void*>(what)};
}

template <typename F>
PyMethodDef method(const char* name, F* function, int flags, const char* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), flags, doc};
}

// The class of T's objects, with slots of its own.
template <typename T>
PyTypeObject* class_of(const char* name, const char* doc, std::vector<PyType_Slot> slots, unsigned flags = 0) {
  for (const PyType_Slot& shared : {slot(Py_tp_doc, const_cast<char*>(doc)), slot(Py_tp_dealloc, dealloc<T>),
                                    slot(Py_tp_traverse, traverse<T>), slot(Py_tp_clear, clear<T>), PyType_Slot{0, nullptr}})
    slots.push_back(shared);
  PyType_Spec spec = {name, sizeof(T), 0, unsigned(Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | flags), slots.data()};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}
