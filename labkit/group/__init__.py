"""Groups of ranks, in the notebook's process: starts ranks, runs functions on them, detects deadlocks, ends ranks.

Nothing in this package draws; a live picture is passed in as a `Picture` (collector.py).

What to open for which change:
- methods and arguments of `lab.Group`, `group[0:2]`, `lab.profile`: group.py; checks, and what `group.spawn` calls:
  arguments.py; the hint at it: notebook/spawn_hint.py; an option: see ipc; tests test_group.py, test_spawn.py
- the words of deadlocks, of lines while ranks wait, and of `group.stacks()`: deadlock_words.py (with `ORIGINS`, the
  functions of torch that are named), mismatches.py (collectives that do not match), parting.py
  (where ranks parted), deadlock_monitor.py (for whom a failed wait waited), unfinished.py, run.py (what ranks did), and
  the names in recording/operations.py. Sentences are written where they are used; there is no table of them to
  translate. Tests of the same names, test_wait_notices.py, test_deadlock_run.py, launch/test_stack_dump.py
- another reason of a deadlock: `Reason` in deadlock.py, and deadlock_words.py
- after how many seconds a wait or a deadlock is reported: constants of deadlock_monitor.py, attributes of the runtime;
  a start, or a run that shows nothing: `SLOW_S` in processes.py, its words: `silence_notice` in deadlock_words.py;
  tests test_no_deadlock.py, test_wait_notices.py
- how prints appear: output.py; how many are kept: printed_lines.py; in the rank: ipc/stdio.py
- what ends a run, the title of `watch`, `lab.Run`: run.py; who hears ranks: message_loop.py; tests test_faults.py,
  test_stop.py
- what happens between two attempts of a run with `restarts`: `_attempts` in group.py; tests test_restarts.py
- when ranks start and end: processes.py; which runs they may serve, and which names of `%%ranks` cells they have:
  pool_state.py; what a run may leave behind: unfinished.py; what groups share, and the default start: open_groups.py;
  tests test_lifetime.py, test_short_runs.py, test_cell_names.py
- what a run has recorded until now: `Records` in collector.py
- `lab.same_as_serial`: same_as_serial.py; prompts of breakpoints: breakpoints.py; tests of the same names
"""
