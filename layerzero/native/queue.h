// A part of hot.cpp: what `LoopDriver.submit` and `Batcher.submit` do to queue a call whose caller, group and place
// are known already. The objects stay Python's; every attribute is read and written by its class's own member.

#pragma once

// An attribute that a class has a slot for: the member by which Python itself reads and writes it.
struct Attribute {
  PyTypeObject* type = nullptr;
  PyMemberDef* member = nullptr;

  void need(PyObject* object) const {
    if (Py_TYPE(object) == type) return;
    PyErr_Format(PyExc_TypeError, "%s needs an object of %R, got %R", member->name, type, object);
    throw PythonError();
  }
  Ref of(PyObject* object) const {
    need(object);
    Ref value(PyMember_GetOne(reinterpret_cast<char*>(object), member));
    if (!value) throw PythonError();
    return value;
  }
  bool is(PyObject* object, PyObject* value) const { return of(object).get() == value; }
  long long number(PyObject* object) const {
    const long long value = PyLong_AsLongLong(of(object).get());
    if (value == -1 && PyErr_Occurred()) throw PythonError();
    return value;
  }
  void set(PyObject* object, PyObject* value) const {
    need(object);
    if (PyMember_SetOne(reinterpret_cast<char*>(object), member, value)) throw PythonError();
  }
  void set(PyObject* object, long long value) const {
    Ref boxed(PyLong_FromLongLong(value));
    if (!boxed) throw PythonError();
    set(object, boxed.get());
  }
};

struct FrontAttributes {
  Attribute ahead, alone, ambient_grad, at_once, armed, callers, inline_limit, inline_runs, lane, loop, now, stepping;
} in_front;
struct LaneAttributes { Attribute backlog, caps, draining, in_flight, queued, queued_bytes, stats, sweep, turn_owed, urgent; } in_lane;
struct GroupAttributes { Attribute busy, bytes, count, lines, slots, tokens; } in_group;
struct InlineAttributes { Attribute inflight, limit_us, live, max_us, stats, used_us; } in_inline;
struct CostsAttributes { Attribute alone_us, callers, unlooked, until_anew; } in_costs;
struct OtherAttributes {
  Attribute caller_last, caller_number, caller_slot, caps_bytes, caps_items, ran_at_once, slot_count, submitted, sweep_arrived, sweep_groups,
      sweep_pending;
} in_rest;
PyObject* current_task = nullptr;  // asyncio's function
PyObject* tasks = nullptr;         // the dict that it reads, where it is written in Python

bool find_attribute(PyObject* type, const char* name, Attribute& attribute) {
  Ref descriptor(PyObject_GetAttrString(type, name));
  if (!descriptor) return false;
  if (Py_TYPE(descriptor.get()) != &PyMemberDescr_Type) {
    PyErr_Format(PyExc_TypeError, "%s needs to be a slot of %R", name, type);
    return false;
  }
  Py_INCREF(type);  // the member is its
  attribute = {reinterpret_cast<PyTypeObject*>(type), reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member};
  return true;
}

// attributes(LoopDriver, Batcher, BatchQueue, ProgramPoint, Caller, BatchLimits, BatcherStats, RoundRobin, InlineRuns,
// GroupCosts): the classes whose objects `queue` and `at_once` are given.
PyObject* attributes(PyObject*, PyObject* given) {
  PyObject *front, *lane, *group, *slot, *caller, *caps, *stats, *sweep, *inlined, *costs;
  if (!PyArg_ParseTuple(given, "OOOOOOOOOO", &front, &lane, &group, &slot, &caller, &caps, &stats, &sweep, &inlined, &costs))
    return nullptr;
  const struct { PyObject* type; const char* name; Attribute& attribute; } wanted[] = {
      {front, "_tick_scheduled", in_front.armed}, {front, "_max_inflight", in_front.ahead}, {front, "sole_caller", in_front.alone},
      {front, "ambient_grad", in_front.ambient_grad}, {front, "at_once", in_front.at_once}, {front, "_callers", in_front.callers},
      {front, "batcher", in_front.lane}, {front, "loop", in_front.loop}, {front, "_now_s", in_front.now},
      {front, "stepping", in_front.stepping}, {front, "inline", in_front.inline_runs},
      {inlined, "used_us", in_inline.used_us}, {inlined, "limit_us", in_inline.limit_us}, {inlined, "max_us", in_inline.max_us}, {inlined, "live", in_inline.live},
      {front, "inline_limit_us", in_front.inline_limit}, {inlined, "inflight", in_inline.inflight}, {inlined, "stats", in_inline.stats},
      {costs, "alone_us", in_costs.alone_us}, {costs, "callers", in_costs.callers}, {costs, "unlooked", in_costs.unlooked},
      {costs, "until_anew", in_costs.until_anew}, {stats, "at_once", in_rest.ran_at_once},
      {lane, "_waiting_for_room", in_lane.backlog}, {lane, "limits", in_lane.caps}, {lane, "draining", in_lane.draining},
      {lane, "inflight_batches", in_lane.in_flight}, {lane, "queued", in_lane.queued},
      {lane, "queued_bytes", in_lane.queued_bytes}, {lane, "stats", in_lane.stats},
      {lane, "round_robin", in_lane.sweep}, {lane, "_turn_due", in_lane.turn_owed}, {lane, "_urgent", in_lane.urgent},
      {group, "active_points", in_group.busy}, {group, "bytes", in_group.bytes}, {group, "count", in_group.count},
      {group, "by_priority", in_group.lines}, {group, "points", in_group.slots}, {group, "tokens", in_group.tokens},
      {caller, "last_queue", in_rest.caller_last}, {caller, "number", in_rest.caller_number}, {caller, "point", in_rest.caller_slot},
      {caps, "max_queue_bytes", in_rest.caps_bytes}, {caps, "max_queue_size", in_rest.caps_items},
      {slot, "count", in_rest.slot_count}, {stats, "submitted", in_rest.submitted},
      {sweep, "activated", in_rest.sweep_arrived}, {sweep, "queues", in_rest.sweep_groups}, {sweep, "active_points", in_rest.sweep_pending}};
  for (const auto& one : wanted) {
    if (find_attribute(one.type, one.name, one.attribute)) continue;
    in_front = {};  // no object is of the class that `has` wants
    return nullptr;
  }
  if (current_task == nullptr) {
    Ref events(PyImport_ImportModule("asyncio"));
    if (!events) return nullptr;
    current_task = PyObject_GetAttrString(events.get(), "current_task");
    if (current_task == nullptr) return nullptr;
    if (PyFunction_Check(current_task)) {
      Ref module(PyImport_ImportModule("asyncio.tasks"));
      if (!module) return nullptr;
      tasks = PyObject_GetAttrString(module.get(), "_current_tasks");
      if (tasks == nullptr || !PyDict_Check(tasks)) {
        PyErr_Clear();
        Py_CLEAR(tasks);
      }
    }
  }
  return none();
}

bool has(const Attribute& attribute, PyObject* object) { return object != nullptr && Py_TYPE(object) == attribute.type; }

// What a dict has under a key; empty where it has nothing.
Ref looked_up(PyObject* dict, PyObject* key) {
  Ref value = Ref::to(PyDict_GetItemWithError(dict, key));
  if (!value && PyErr_Occurred()) throw PythonError();
  return value;
}

void insert(const Ref& dict, PyObject* key) {
  if (PyDict_SetItem(dict.get(), key, Py_None)) throw PythonError();
}

Ref task_of(PyObject* loop) {
  Ref task = tasks != nullptr ? looked_up(tasks, loop) : Ref(PyObject_CallOneArg(current_task, loop));
  if (PyErr_Occurred()) throw PythonError();
  return task;
}

// The caller that submits now: the coroutine being stepped, else the current task if the front knows it.
Ref caller_of(PyObject* front, PyObject* loop) {
  Ref stepping = in_front.stepping.of(front);
  if (stepping.get() != Py_None) return stepping;
  Ref task = task_of(loop);
  return task ? looked_up(in_front.callers.of(front).get(), task.get()) : Ref();
}

// What a lane holds before a call joins it.
struct Waiting {
  long long calls, bytes;
};

// Whether a call of so many bytes finds room without waiting, being refused or standing behind who waits.
bool has_room(PyObject* lane, const Waiting& waiting, long long bytes) {
  if (PyDict_GET_SIZE(in_lane.backlog.of(lane).get()) != 0 || !in_lane.draining.is(lane, Py_False)) return false;
  if (waiting.calls == 0) return true;
  Ref caps = in_lane.caps.of(lane);
  return waiting.calls < in_rest.caps_items.number(caps.get()) &&
         waiting.bytes + bytes <= in_rest.caps_bytes.number(caps.get());
}

// Put a ticket with a known caller, group and place into them, as `Batcher.submit` and `Batcher._enqueue` do.
void enqueue(PyObject* lane, const Waiting& waiting, Ticket* ticket, PyObject* caller, PyObject* group, PyObject* slot) {
  auto* self = reinterpret_cast<PyObject*>(ticket);
  Ref stats = in_lane.stats.of(lane);
  ticket->seq = in_rest.submitted.number(stats.get()) + 1;
  in_rest.submitted.set(stats.get(), ticket->seq);
  if (waiting.calls == 0 && in_lane.in_flight.number(lane) == 0) in_lane.turn_owed.set(lane, Py_True);
  in_rest.caller_last.set(caller, group);
  in_rest.caller_slot.set(caller, slot);
  const long long count = in_rest.slot_count.number(slot);
  if (count == 0) {
    Ref sweep = in_lane.sweep.of(lane);
    insert(in_rest.sweep_pending.of(sweep.get()), slot);
    if (PyList_Append(in_rest.sweep_arrived.of(sweep.get()).get(), slot)) throw PythonError();
    insert(in_group.busy.of(group), slot);
  }
  in_rest.slot_count.set(slot, count + 1);
  put_new(ticket->slot, slot);
  ticket->state = QUEUED;
  insert(Ref::to(PyTuple_GET_ITEM(in_group.lines.of(group).get(), ticket->priority)), self);
  if (ticket->priority == 0) insert(in_lane.urgent.of(lane), self);
  in_group.count.set(group, in_group.count.number(group) + 1);
  in_group.tokens.set(group, in_group.tokens.number(group) + ticket->tokens);
  in_group.bytes.set(group, in_group.bytes.number(group) + ticket->bytes);
  in_lane.queued.set(lane, waiting.calls + 1);
  in_lane.queued_bytes.set(lane, waiting.bytes + ticket->bytes);
}

// Whether the ticket was queued as `LoopDriver.submit` would; nothing is done for a call that has a deadline, runs alone,
// finds no room, or whose caller, group or place is new.
bool queued(PyObject* front, Ticket* ticket) {
  if (!has(in_front.lane, front)) return false;
  if (ticket->state != NEW || (ticket->deadline != nullptr && ticket->deadline != Py_None) ||
      ticket->group == nullptr || ticket->group == Py_None)
    return false;
  Ref own_lane = in_front.lane.of(front), loop = in_front.loop.of(front);
  PyObject* lane = own_lane.get();
  if (!has(in_lane.queued, lane)) return false;
  const Waiting waiting{in_lane.queued.number(lane), in_lane.queued_bytes.number(lane)};
  if (!has_room(lane, waiting, ticket->bytes)) return false;
  Ref caller = caller_of(front, loop.get());
  if (!has(in_rest.caller_last, caller.get())) return false;
  Ref group = looked_up(in_rest.sweep_groups.of(in_lane.sweep.of(lane).get()).get(), ticket->group);
  if (!has(in_group.slots, group.get())) return false;
  Ref slot = looked_up(in_group.slots.of(group.get()).get(), in_rest.caller_last.of(caller.get()).get());
  if (!has(in_rest.slot_count, slot.get())) return false;
  ticket->at = PyFloat_AsDouble(in_front.now.of(front).get());
  if (ticket->at == 0.0) {
    Ref time(PyObject_CallMethod(loop.get(), "time", nullptr));
    if (!time) throw PythonError();
    ticket->at = PyFloat_AsDouble(time.get());
  }
  if (PyErr_Occurred()) throw PythonError();
  put_new(ticket->caller, caller.get());
  put_new(ticket->front, front);
  put_new(ticket->loop, loop.get());
  enqueue(lane, waiting, ticket, caller.get(), group.get(), slot.get());
  if (in_front.armed.is(front, Py_False) && in_lane.in_flight.number(lane) < in_front.ahead.number(front)) {
    Ref armed(PyObject_CallMethod(front, "schedule_tick", nullptr));
    if (!armed) throw PythonError();
  }
  return true;
}

// queue(front, ticket): whether it was queued.
PyObject* queue(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !is_ticket(args[1])) Py_RETURN_FALSE;
  return guarded([&] { return PyBool_FromLong(queued(args[0], reinterpret_cast<Ticket*>(args[1]))); });
}
