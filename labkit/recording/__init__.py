"""Recording of what a rank does (spans, scalars, pending operations) in shared memory.

What to open for which change:
- what `lab.span`, `lab.steps` and `lab.record` accept and do, which code is the student's: record.py; steps that
  labkit finds by itself: `AutomaticSteps` there; tests test_automatic_steps.py
- record another collective, name or colour it, predict its time: an entry in operations.py, or a `Form` of an entry.
  Nothing else if torch's process groups have a method for it: worker/comm/process_group.py intercepts every method that
  the table names. A function made of other collectives (all_gather_object) is recorded as these.
  helpers/made_up_collective.py adds one; tests test_operations.py, worker/comm/test_process_group.py
- the bytes of an operation: which share is sent to whom is `Traffic` and `Cost` in operations.py, which plots/flows.py
  adds up; the bytes of a tensor: `nbytes_of` in worker/comm/descriptions.py; of TensorFlow's operations:
  worker/runtimes/tensorflow/sizes.py
- give a span another field: an attribute of `Span` in schema.py, and of `Pending` if operations under way have it; its
  place in `RECORD_FIELDS` of ring_buffer.py, and a parameter of the method there that writes it. A flag needs neither:
  it is one more bit of `flags=`. Columns and files follow (events.py, tracing/trace_file.py). Whatever knows the value
  passes it: for spans record.py (`_ComputeSpan` packs its record itself) and worker/comm/phases.py; for operations, on
  GPUs too, worker/comm/operation.py; a search for the calls of the method finds the rest (RPC, TensorFlow); tests
  test_schema.py, test_ring_buffer.py
- record something else than spans and values, such as waits for what is complete already (`Trace.waits`): its kind in
  schema.py, its record and a method in ring_buffer.py, `from_records` and an argument of `Trace` in tracing/trace.py,
  its place in files in tracing/trace_file.py; tests also worker/comm/test_work.py
- how many records a rank's memory holds, which names find room: ring_buffer.py; who creates that memory:
  launch/rank_process.py; tests test_ring_buffer.py,
  test_fork_isolation.py
- records of another machine, and its times: ring_copy.py, clock.py. How exact they are is `Trace.clock_error_ns`
- what must match on the ranks of a collective, the names of groups and mesh axes: group_keys.py
- what a rank notes of a training, to be compared after the run: rank_facts.py; see worker/comm
- the cores of this machine, and its load: cores.py; do something once a module is imported: import_hook.py
"""

from typing import Final

TRACE_VARIABLE: Final = "LABKIT_TRACE"  # names the folder in which a script started by torchrun saves what its ranks record
TRACE_FOLDER: Final = "labkit-trace"  # used by `python -m labkit` if the variable is not set
