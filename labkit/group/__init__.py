"""Groups of ranks, in the notebook's process: starts ranks, runs functions on them, detects deadlocks, ends ranks.

Nothing in this package draws; a live picture is passed in as a `picture.Picture` (picture.py).

What to open for which change:
- methods and arguments of `lab.Group`: group.py; checks: arguments.py; an option: see ipc; `group[0:2]`:
  rank_selection.py; `group.spawn`: spawn.py, and the hint in notebook/spawn_hint.py; `lab.profile`: profile.py; tests
  test_group.py
- the words of deadlocks: deadlock_words.py (errors, and `ORIGINS`, the functions of torch that are named), `HINTS` in
  deadlock.py, wait_notices.py (lines while ranks wait), mismatches.py (collectives that do not match), parting.py
  (where ranks parted), failed_waits.py, unfinished.py, run.py (what ranks did), and the names in
  recording/operations.py. Sentences are written where they are used; there is no table of them to translate. Tests of
  the same names, test_deadlock_run.py, test_no_deadlock.py
- another reason of a deadlock: `Reason` in deadlock.py, and deadlock_words.py
- after how many seconds a wait or a deadlock is reported: constants of deadlock_monitor.py, attributes of the runtime;
  tests test_no_deadlock.py
- how prints appear: output.py; how many are kept: printed_lines.py; in the rank: ipc/stdio.py
- what ends a run, the title of `watch`, `lab.Run`: run.py; who hears ranks: message_loop.py; tests test_faults.py,
  test_stop.py
- when ranks start and end: processes.py; which runs they may serve: pool_state.py; what a run may leave behind:
  unfinished.py; what groups share, and the default start: open_groups.py; tests test_lifetime.py, test_short_runs.py
- what a run has recorded until now: collector.py; `group.stacks()`: stack_report.py; tests launch/test_stack_dump.py
- `lab.same_as_serial`: same_as_serial.py; names of `%%ranks` cells: cell_names.py; prompts of breakpoints:
  breakpoints.py; which notebook is open, for guesses: opened.py; tests of the same names
"""
