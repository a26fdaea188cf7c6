// A part of hot.cpp: what `InlineRuns.ready` and `InlineRuns.run` do for a call of an op whose group's calls run at once,
// where its caller is known to the group and nothing is to be timed or counted anew.

#pragma once

// Whether the callers of this turn may go on, and no batch runs elsewhere.
bool may_go_on(PyObject* inline_runs) {
  Ref used = in_inline.used_us.of(inline_runs), limit = in_inline.limit_us.of(inline_runs);
  if (!(PyFloat_AsDouble(used.get()) < PyFloat_AsDouble(limit.get()))) return false;
  if (PyErr_Occurred()) throw PythonError();
  Ref inflight = in_inline.inflight.of(inline_runs);
  return PyList_CheckExact(inflight.get()) && PyList_GET_SIZE(inflight.get()) == 0;
}

// Whether the caller that submits now is one of those that share the group, or may be from now on: `InlineRuns.joins` says
// of one that nobody knows, and where even of those that are still there too many share it. As `ImmediateGroups.call_ran`.
bool shares(PyObject* front, PyObject* loop, PyObject* inline_runs, PyObject* key, PyObject* costs, long long unlooked) {
  if (Ref caller = caller_of(front, loop); caller) {
    Ref number = in_rest.caller_number.of(caller.get()), callers = in_costs.callers.of(costs);
    const int there = PySet_Contains(callers.get(), number.get());
    if (there < 0) throw PythonError();
    if (there) return true;
    if (PySet_GET_SIZE(callers.get()) >= unlooked) {
      Ref live = in_inline.live.of(inline_runs), kept(PyNumber_InPlaceAnd(callers.get(), live.get()));
      if (!kept) throw PythonError();
    }
    if (PySet_GET_SIZE(callers.get()) < unlooked) {
      if (PySet_Add(callers.get(), number.get())) throw PythonError();
      return true;
    }
  }
  Ref joins(PyObject_CallMethod(inline_runs, "joins", "OO", key, costs));
  if (!joins) throw PythonError();
  return joins.get() == Py_True;
}

// Count microseconds of work done inline since the loop's last turn. Throws: PythonError.
void add_inline(PyObject* front, double us) {
  Ref inline_runs = in_front.inline_runs.of(front);
  Ref sum(PyFloat_FromDouble(PyFloat_AsDouble(in_inline.used_us.of(inline_runs.get()).get()) + us));
  if (!sum || PyErr_Occurred()) throw PythonError();
  in_inline.used_us.set(inline_runs.get(), sum.get());
}

// The value of a call, its plan noted; as `AwaitedOp.run_inline`.
PyObject* value_by_plan(PyObject* plan, PyObject* device, PyObject* const* values, Py_ssize_t count, PyObject* last) {
  if (PyObject_SetAttr(last, known.plan, plan)) return nullptr;
  Ref call(PyObject_GetAttr(plan, known.call));
  if (!call) return nullptr;
  PyObject* value = PyObject_Vectorcall(call.get(), values, size_t(count), nullptr);
  if (value != nullptr || !PyErr_ExceptionMatches(PyExc_Exception)) return value;
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  Ref recover(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(device)), "recover"));
  PyErr_Clear();
  PyErr_Restore(type, error, trace);
  if (!recover) return nullptr;
  Ref next = recovered_pair(recover.get(), device, plan, values, count);
  if (!next) return nullptr;
  if (PyObject_SetAttr(last, known.plan, PyTuple_GET_ITEM(next.get(), 1))) return nullptr;
  return Ref::to(PyTuple_GET_ITEM(next.get(), 0)).release();
}

// Whether a call of a group (`key`: its group, or the op where it has none) runs now, in its caller's step; it is counted.
// Throws: PythonError.
Ref costs_at_once(PyObject* front, PyObject* loop, PyObject* key) {
  if (!has(in_front.lane, front) || !in_front.alone.is(front, Py_None)) return Ref();
  Ref groups = in_front.at_once.of(front);
  if (PyDict_GET_SIZE(groups.get()) == 0) return Ref();
  Ref costs = looked_up(groups.get(), key);
  if (!has(in_costs.unlooked, costs.get())) return Ref();
  const long long unlooked = in_costs.unlooked.number(costs.get());  // none: calls are to be timed
  Ref inline_runs = in_front.inline_runs.of(front);
  if (unlooked == 0 || in_costs.until_anew.number(costs.get()) < 3 || !may_go_on(inline_runs.get()) ||
      !shares(front, loop, inline_runs.get(), key, costs.get(), unlooked))
    return Ref();
  in_costs.until_anew.set(costs.get(), in_costs.until_anew.number(costs.get()) - 1);
  Ref stats = in_inline.stats.of(inline_runs.get());
  in_rest.ran_at_once.set(stats.get(), in_rest.ran_at_once.number(stats.get()) + 1);
  return costs;
}

// Whether the task that asks is alone here and may run a call of so many microseconds; as `LoopDriver.may_inline`.
// Throws: PythonError.
bool alone_runs(PyObject* front, PyObject* loop, double expected_us) {
  if (!has(in_front.lane, front)) return false;
  Ref alone = in_front.alone.of(front);
  if (alone.get() == Py_None || !(expected_us < PyFloat_AsDouble(in_front.inline_limit.of(front).get()))) return false;
  Ref inline_runs = in_front.inline_runs.of(front);
  const double used_us = PyFloat_AsDouble(in_inline.used_us.of(inline_runs.get()).get());
  const bool room = used_us < PyFloat_AsDouble(in_inline.max_us.of(inline_runs.get()).get());
  if (PyErr_Occurred()) throw PythonError();
  return room && task_of(loop).get() == alone.get();
}

double alone_us_of(PyObject* costs) { return PyFloat_AsDouble(in_costs.alone_us.of(costs).get()); }
