"""How ranks are started, asked and ended; runs in the notebook's process and in the server that forks ranks.

What to open for which change:
- another way to start processes: a subclass of `Starter` in starters.py, like `SpawnStarter`; its name in `STARTS` of
  ipc/options.py; the choice, and the default: group/open_groups.py; what a new process does first: new_process.py; the
  server: fork_server.py; what they ask each other: server_requests.py; a rank's end in the notebook: rank_process.py;
  tests test_starters.py
- start faster: `preload` of the runtime, `collapse` in fork_server.py; in the kernel: `FIRST_USED` in
  notebook/on_import.py
- words and limits of a slow start: group/processes.py; tests test_starters.py
- what this machine must offer (memory, files): capacity.py; tests test_usable_memory.py, group/test_group.py
- show something else that a rank uses, as disk reads: a field of `Load` and where it is read in resource_usage.py;
  drawn by plots/live/drawing.py; tests also plots/test_live.py. From other machines it comes by itself. `Load` is for
  the live picture only and not in the trace: what must be in the trace is recorded in the rank (recording/)
- the stacks of ranks, and which threads wait, for deadlocks: thread_states.py, frames.py (whose code); their words:
  group/deadlock_words.py; tests test_stack_dump.py, test_thread_states.py
- how ranks end, with the processes that they have started, or after the notebook (the guard): descendants.py; tests
  test_starters.py
"""
