"""Replay: a trace as a graph of events, and what it would look like after a change.

Replay alters times, never events: its graph has the operations that were recorded, in their order (`one_bucket` only
drops collectives whose bytes travel in another). What another program would do is a question for `lab.simulate`, which
builds a graph of its own (group/simulation/program_graph.py).
The package is not called `replay`: importing it would set that attribute of `labkit`, which is the function.

What to open for which change:
- another question: a field of `ProgramChanges`, its words and what it does to the times in changes.py; the argument in
  replay.py, and docs/replay.md; tests test_replay.py (by hand), test_replayed_runs.py (real runs)
- which traces are refused, and why: `_why_not` in graph.py; tests test_replay.py
- the model: graph.py (which ranks an operation needs), times.py (when events happen, also over emulated links); tests
  test_replay.py, test_recorded_details.py
- which changes `lab.what_helps` tries, and their words: gains.py; its figure: plots/what_helps.py
- what `lab.explain` says, and which changes it replays: explain.py; with cures that were really applied: `python -m
  bench.speed.explained`
- the critical path: critical_path.py; how it is drawn: plots/timeline.py; tests plots/test_path_line.py
"""
