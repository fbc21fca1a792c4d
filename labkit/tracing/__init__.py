"""Traces: the recorded spans of a run as data, with their arithmetic and their files.

What to open for which change:
- compute or export something else of a trace: a method of `Trace` in trace.py; sets of times: intervals.py; when a
  rank waits: waiting.py; tests test_trace.py. What is no event (names, nodes, link): `TraceInfo` in trace_file.py, and
  an argument of `Trace`
- trace files: trace_file.py (the file), perfetto.py (the events in it); `lab.load_trace`, and folders of traced
  scripts: load.py; tests test_trace_file.py
- what counts as a step, `lab.step_ms`, `lab.best_of`: step_times.py
- a fault that raises no error: its `FaultKind` with its cure, and what the trace shows: silent_faults.py; what ranks
  compare, and the sentences of `lab.verdict`: verdict.py; the facts for it are noted in worker/comm/training_facts.py
- which limit `lab.explain` names: limits.py; what compute could hide: overlapping.py; what is a pipeline:
  recognized_pipelines.py; its words: replaying/explain.py
- what decides about a guess (spread of runs, busy machine): measurement.py; tests also teaching/test_guesses.py
- `lab.schedule`: ideal_pipeline.py; how many records the live picture gets: downsample.py
"""
