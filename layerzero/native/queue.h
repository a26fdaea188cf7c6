// A part of hot.cpp: what `LoopDriver.submit` and `Batcher.submit` do to queue a call whose caller, group and place
// are known already. The objects stay Python's; their slots are read and written where they lie.

#pragma once

// Where an object of a class keeps one of its slots.
struct Place {
  PyTypeObject* type = nullptr;
  Py_ssize_t offset = 0;
  PyObject*& of(PyObject* object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
  }
};

struct FrontPlaces { Place ahead, alone, ambient_grad, armed, callers, lane, loop, now, stepping; } in_front;
struct LanePlaces { Place backlog, caps, draining, in_flight, queued, queued_bytes, seq, stats, sweep, turn_owed, urgent; } in_lane;
struct GroupPlaces { Place busy, bytes, count, lines, slots, tokens; } in_group;
struct RestPlaces {
  Place caller_last, caller_slot, caps_bytes, caps_items, slot_count, submitted, sweep_arrived, sweep_groups, sweep_pending;
} in_rest;
PyObject* current_task = nullptr;  // asyncio's function
PyObject* tasks = nullptr;         // the dict that it reads, where it is written in Python

bool find_place(PyObject* type, const char* name, Place& place) {
  Ref found(PyObject_GetAttrString(type, name));
  if (!found) return false;
  auto* member = reinterpret_cast<PyMemberDescrObject*>(found.get());
  if (!PyObject_TypeCheck(found.get(), &PyMemberDescr_Type) || member->d_member->type != T_OBJECT_EX) {
    PyErr_Format(PyExc_TypeError, "%s needs to be a slot of %R", name, type);
    return false;
  }
  place = {reinterpret_cast<PyTypeObject*>(type), member->d_member->offset};
  return true;
}

// layout(Front, Lane, Group, Slot, Caller, Caps, Stats, Sweep): where `queue` finds their slots.
PyObject* layout(PyObject*, PyObject* given) {
  PyObject *front, *lane, *group, *slot, *caller, *caps, *stats, *sweep;
  if (!PyArg_ParseTuple(given, "OOOOOOOO", &front, &lane, &group, &slot, &caller, &caps, &stats, &sweep)) return nullptr;
  const struct { PyObject* type; const char* name; Place& place; } wanted[] = {
      {front, "_tick_scheduled", in_front.armed}, {front, "_max_inflight", in_front.ahead}, {front, "sole_caller", in_front.alone},
      {front, "ambient_grad", in_front.ambient_grad}, {front, "_callers", in_front.callers},
      {front, "batcher", in_front.lane}, {front, "loop", in_front.loop}, {front, "_now_s", in_front.now},
      {front, "stepping", in_front.stepping},
      {lane, "_waiting_for_room", in_lane.backlog}, {lane, "limits", in_lane.caps}, {lane, "draining", in_lane.draining},
      {lane, "inflight_batches", in_lane.in_flight}, {lane, "queued", in_lane.queued},
      {lane, "queued_bytes", in_lane.queued_bytes}, {lane, "_seq", in_lane.seq}, {lane, "stats", in_lane.stats},
      {lane, "round_robin", in_lane.sweep}, {lane, "_turn_due", in_lane.turn_owed}, {lane, "_urgent", in_lane.urgent},
      {group, "active_points", in_group.busy}, {group, "bytes", in_group.bytes}, {group, "count", in_group.count},
      {group, "by_priority", in_group.lines}, {group, "points", in_group.slots}, {group, "tokens", in_group.tokens},
      {caller, "last_queue", in_rest.caller_last}, {caller, "point", in_rest.caller_slot},
      {caps, "max_queue_bytes", in_rest.caps_bytes}, {caps, "max_queue_size", in_rest.caps_items},
      {slot, "count", in_rest.slot_count}, {stats, "submitted", in_rest.submitted},
      {sweep, "activated", in_rest.sweep_arrived}, {sweep, "queues", in_rest.sweep_groups}, {sweep, "active_points", in_rest.sweep_pending}};
  for (const auto& one : wanted)
    if (!find_place(one.type, one.name, one.place)) return nullptr;
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

bool has(const Place& place, PyObject* object) { return object != nullptr && Py_TYPE(object) == place.type; }

long long number(const Place& place, PyObject* object) { return PyLong_AsLongLong(place.of(object)); }

bool add(const Place& place, PyObject* object, long long more) {
  PyObject* sum = PyLong_FromLongLong(number(place, object) + more);
  if (sum == nullptr) return false;
  put(place.of(object), sum);
  return true;
}

// The caller that submits now: the coroutine being stepped, else the current task if the front knows it.
Ref caller_of(PyObject* front) {
  PyObject* stepping = in_front.stepping.of(front);
  if (stepping != Py_None) return Ref::to(stepping);
  PyObject* loop = in_front.loop.of(front);
  Ref task = tasks != nullptr ? Ref::to(PyDict_GetItemWithError(tasks, loop))
                              : Ref(PyObject_CallOneArg(current_task, loop));
  if (!task) return Ref();
  return Ref::to(PyDict_GetItemWithError(in_front.callers.of(front), task.get()));
}

// Whether a call of so many bytes finds room without waiting, being refused or standing behind who waits.
bool has_room(PyObject* lane, long long bytes) {
  if (PyDict_GET_SIZE(in_lane.backlog.of(lane)) != 0 || in_lane.draining.of(lane) != Py_False) return false;
  const long long queued = number(in_lane.queued, lane);
  PyObject* caps = in_lane.caps.of(lane);
  return queued == 0 || (queued < number(in_rest.caps_items, caps) &&
                         number(in_lane.queued_bytes, lane) + bytes <= number(in_rest.caps_bytes, caps));
}

// Put a ticket with a known caller, group and place into them, as `Batcher.submit` and `Batcher._enqueue` do.
bool enqueue(PyObject* lane, Ticket* ticket, PyObject* caller, PyObject* group, PyObject* slot, double now) {
  auto* self = reinterpret_cast<PyObject*>(ticket);
  PyObject* sweep = in_lane.sweep.of(lane);
  if (!add(in_rest.submitted, in_lane.stats.of(lane), 1) || !add(in_lane.seq, lane, 1)) return false;
  ticket->seq = number(in_lane.seq, lane);
  ticket->at = now;
  if (number(in_lane.queued, lane) == 0 && number(in_lane.in_flight, lane) == 0)
    put_new(in_lane.turn_owed.of(lane), Py_True);
  put_new(in_rest.caller_last.of(caller), group);
  put_new(in_rest.caller_slot.of(caller), slot);
  if (number(in_rest.slot_count, slot) == 0 &&
      (PyDict_SetItem(in_rest.sweep_pending.of(sweep), slot, Py_None) ||
       PyList_Append(in_rest.sweep_arrived.of(sweep), slot) ||
       PyDict_SetItem(in_group.busy.of(group), slot, Py_None)))
    return false;
  if (!add(in_rest.slot_count, slot, 1)) return false;
  put_new(ticket->slot, slot);
  ticket->state = QUEUED;
  PyObject* line = PyTuple_GET_ITEM(in_group.lines.of(group), ticket->priority);
  if (PyDict_SetItem(line, self, Py_None)) return false;
  if (ticket->priority == 0 && PyDict_SetItem(in_lane.urgent.of(lane), self, Py_None)) return false;
  return add(in_group.count, group, 1) && add(in_group.tokens, group, ticket->tokens) &&
         add(in_group.bytes, group, ticket->bytes) && add(in_lane.queued, lane, 1) &&
         add(in_lane.queued_bytes, lane, ticket->bytes);
}

// 1 where the ticket was queued as `LoopDriver.submit` would; 0, and nothing done, for a call that has a deadline, runs
// alone, finds no room, or whose caller, group or place is new; -1 with an error set.
int queued(PyObject* front, Ticket* ticket) {
  if (!has(in_front.lane, front)) return 0;
  PyObject* lane = in_front.lane.of(front);
  if (ticket->state != NEW || (ticket->deadline != nullptr && ticket->deadline != Py_None) ||
      ticket->group == nullptr || ticket->group == Py_None || !has(in_lane.queued, lane) ||
      !has_room(lane, ticket->bytes))
    return 0;
  Ref caller = caller_of(front);
  if (PyErr_Occurred()) return -1;
  if (!has(in_rest.caller_last, caller.get())) return 0;
  PyObject* groups = in_rest.sweep_groups.of(in_lane.sweep.of(lane));
  Ref group = Ref::to(PyDict_GetItemWithError(groups, ticket->group));
  if (PyErr_Occurred()) return -1;
  if (!has(in_group.slots, group.get())) return 0;
  Ref slot = Ref::to(PyDict_GetItemWithError(in_group.slots.of(group.get()), in_rest.caller_last.of(caller.get())));
  if (PyErr_Occurred()) return -1;
  if (!has(in_rest.slot_count, slot.get())) return 0;
  double now = PyFloat_AsDouble(in_front.now.of(front));
  if (now == 0.0) {
    Ref time(PyObject_CallMethod(in_front.loop.of(front), "time", nullptr));
    if (!time) return -1;
    now = PyFloat_AsDouble(time.get());
  }
  if (PyErr_Occurred()) return -1;
  put_new(ticket->caller, caller.get());
  put_new(ticket->front, front);
  put_new(ticket->loop, in_front.loop.of(front));
  if (!enqueue(lane, ticket, caller.get(), group.get(), slot.get(), now)) return -1;
  if (in_front.armed.of(front) == Py_False && number(in_lane.in_flight, lane) < number(in_front.ahead, front)) {
    Ref armed(PyObject_CallMethod(front, "_schedule_tick", nullptr));
    if (!armed) return -1;
  }
  return 1;
}

// queue(front, ticket): whether it was queued.
PyObject* queue(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !is_ticket(args[1])) Py_RETURN_FALSE;
  const int how = queued(args[0], reinterpret_cast<Ticket*>(args[1]));
  return how < 0 ? nullptr : PyBool_FromLong(how);
}
