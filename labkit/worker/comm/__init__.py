"""Records every collective, message and RPC of a rank as a span, and delays them on an emulated link.

What to open for which change:
- which collectives are recorded, and as what: recording/operations.py. How they are intercepted: process_group.py,
  which install.py installs (`_collective` gives one a name of its own); bytes, and what must match on all ranks:
  descriptions.py; tests test_process_group.py, test_gpu_tensors.py. Whose ranks a process group has, and labkit's own
  record of its creation: members.py
- when an operation begins, waits and ends, and which time limits are the program's own: operation.py (`OwnLimit`);
  `Work` objects, messages that nobody waits for yet, gloo with a GPU's tensors: work.py; futures: futures.py; tests
  test_operation.py, test_work.py. What a failed wait waited for: group/deadlock_monitor.py, tests
  group/test_no_deadlock.py. GPUs: cuda_timing.py; tests test_gpu_tensors.py
- remote calls, their names and time limits, references to values of other ranks: rpc_calls.py; where their results are
  waited for: futures.py; tests test_rpc_calls.py
- phases (forward, backward, optimizer, data, stages of a pipeline): phases.py, backward.py; tests test_phases.py,
  test_pipelines.py, programs notebook/pasted/plain_*.py. `lab.track_memory`: memory_tracker.py
- a program that sets up torch itself: process_group_initialization.py, rendezvous.py, rpc_initialization.py; tests
  test_initialization.py, notebook/test_pasted.py
- a private name of torch: an entry in recording/torch_internals.py; `test_house.py` finds any other use
- a fact of training that ranks compare after the run: training_facts.py notes it (kinds: recording/rank_facts.py);
  tracing/verdict.py (between ranks) or group/same_as_serial.py (with one rank) compares it; the cure is in
  tracing/silent_faults.py, its row in docs/reliability.md; tests tracing/test_verdict.py, group/test_same_as_serial.py
- emulated links: emulated_link.py, for remote calls `_SlowCalls` in rpc_calls.py; how long operations take on them:
  costs/shared_link.py; tests test_emulated_link.py, test_emulated_network.py
"""
