"""A few ranks of many, executed on tensors without data: what they compute, send and wait for, and when.

The package is not called `simulate`: importing it would set that attribute of `labkit`, which is the function.

What to open for which change:
- another kind of program: fake_rank.py (what is replaced in torch), refused_calls.py (what is refused), kernel_mode.py
  (operators), simulated_group.py (collectives), rank_log.py (events, live memory), unknown_values.py (values of tensors
  without data); tests: a program in helpers/simulated_programs.py, which test_real_groups.py compares with real groups
- arguments, and which ranks are executed: simulate.py; what a rank does, as data: program.py; tests test_simulate.py,
  test_representatives.py
- what a rank waits for and how long, and the trace of it: program_graph.py, costs/device.py (kernels),
  costs/emulated_costs.py (communication); tests test_simulated_trace.py (by hand)
"""
