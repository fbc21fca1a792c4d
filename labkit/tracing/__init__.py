"""Traces: the recorded spans of a run as data, with their arithmetic and their files.

What to open for which change:
- compute or export something else of a trace: a method of `Trace` in trace.py; sets of times, and when a rank waits:
  intervals.py; tests test_trace.py. What is no event (names, nodes, link): `FACTS` in trace_file.py, and an
  argument of `Trace`
- the trace of a run whose ranks were replaced: attempts.py; which of its attempts a figure shows: `trace_of` in
  step_times.py
- trace files, and the events in them: trace_file.py; `lab.load_trace`, and folders of traced scripts: load.py; tests
  test_trace_file.py, test_perfetto.py
- what counts as a step, `lab.step_ms`, `lab.best_of`; what decides about a guess (spread of runs, busy machine):
  step_times.py; tests also test_measurement.py, teaching/test_guesses.py
- a fault that raises no error: its `FaultKind` with its cure, and what the trace shows: silent_faults.py; what ranks
  compare, and the sentences of `lab.verdict`: verdict.py; the facts for it are noted in worker/comm/training_facts.py
- which limit `lab.explain` names: limits.py; what compute could hide, and what is a pipeline: patterns.py; its words:
  replaying/explain.py
- `lab.schedule`: ideal_pipeline.py; how many records the live picture gets: downsample.py
"""
