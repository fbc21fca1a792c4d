"""A rank's process: how it starts and ends, its main loop, and the state that it copies from the notebook.

What to open for which change:
- what a rank does with a message: main_loop.py; tests group/test_group.py, group/test_faults.py
- what it copies (folder, import path, environment, filters of warnings): process_state.py; tests also
  test_working_folder.py, test_warnings.py
- what it shows: display.py (figures, last expressions, warnings; tests also test_warnings.py); prints:
  ipc/stdio.py
- `breakpoint()`: debugger.py in the rank, group/breakpoints.py in the notebook; what one tells the other:
  ipc/protocol.py, and group/run.py, which answers; tests group/test_breakpoints.py; commands: docs/working.md
- stacks of a blocked rank: stack_writer.py; who asks for them: launch/thread_states.py; tests launch/test_stack_dump.py
- errors that come late (GPU, child processes): late_errors.py
- the private network of the ranks, LABKIT_NETWORK: network_namespace.py; tests also test_other_users.py
- `lab.profile`: torch_profiler.py in the rank, group/group.py in the notebook
- scripts that torchrun starts: script_recorder.py (LABKIT_TRACE), labkit/__main__.py (`python -m labkit`, and its
  commands; tests test_command.py). Another launcher of scripts: torchrun's variables are read in script_recorder.py
"""
