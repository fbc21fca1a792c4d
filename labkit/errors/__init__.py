"""Errors as students see them: exceptions, why a process ended, wrong arguments, numbers with units.

What to open for which change:
- why a process ended (OOM killer, signals, one more cause): exit_reasons.py, which also
  finds the limits of a container. Causes that an exception shows: ipc/tracebacks.py; tests group/test_explained.py
- what an exception keeps, and how a notebook shows it; the message for a missing package: exceptions.py
- a hint for an error of torch or TensorFlow that does not say what to change: library_hints.py; tests
  group/test_explained.py
- wrong calls that are explained in one line: wrong_calls.py; each public function has its `@public_api`; a number that
  a student gives: `check_number` there; tests test_number_checks.py
- how numbers, times and rates read: units.py, and plots/explorer/texts.js; lists of ranks, tables: lists.py
"""
