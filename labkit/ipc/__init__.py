"""Sends functions, arguments, results, errors and printed output between the notebook and its ranks.

What to open for which change:
- what is sent by value, and how: pickling.py (functions, large arrays), reductions.py (decorators that keep state,
  locks, objects of torch and TensorFlow); the names in a function: code_names.py; large results:
  process_memory.py; tests test_pickling.py; functions and classes that results refer to: pickling.py; tests
  test_definitions.py
- the message for what cannot be sent: pickling_errors.py, reductions.py; tests test_pickling.py
- an option of a group: its field and check in options.py, which reaches every rank; its argument and attribute
  (`FixedArgument`) in group/group.py; what acts on it in the rank: `_Rank` in worker/main_loop.py, or its runtime; if
  the runtime or the machine must have something: group/arguments.py; tests group/test_group.py. Where ranks are, and
  variables that describe a machine: options.py; tests test_place.py, test_machine_variables.py
- another message between notebook and ranks: its class in protocol.py; worker/main_loop.py sends it;
  `Execution.message` in group/run.py receives it in a run, `RankPool.exchange` in group/processes.py asks for it
  outside. How it travels: channel.py; tests test_protocol.py
- errors of ranks: tracebacks.py (headline, frames that are left out); of functions called by
  RPC: there, too; tests test_rpc_errors.py
- what a `%%ranks` cell may contain: ranks_cell.py; tests notebook/test_ranks_magic.py
- `input`, `exit` and `get_ipython` in ranks: reductions.py; tests worker/test_display.py
- prints in a rank: stdio.py; how they are shown: group/output.py; tests group/test_output.py
"""
