"""Records every collective, message and RPC of a rank as a span, and delays them on an emulated link.

What to open for which change:
- which collectives are recorded, and as what: recording/operations.py. How they are intercepted: process_group.py,
  which install.py installs (`_collective` gives one a name of its own); bytes, and what must match on all ranks:
  descriptions.py; tests test_process_group.py, test_gpu_tensors.py. Process groups: members.py (whose ranks),
  group_creation.py (labkit's own)
- when an operation begins, waits and ends: operation.py; `Work` objects: work.py; futures: futures.py; messages that
  nobody waits for yet: completion.py; tests test_operation.py. GPUs: cuda_timing.py; gloo with a GPU's tensors:
  host_copy.py; tests test_gpu_tensors.py
- remote calls: rpc_calls.py; their names: rpc_names.py; references: rpc_references.py; tests test_rpc_calls.py
- phases (forward, backward, optimizer, data): phases.py, backward.py; tests test_phases.py, programs
  notebook/pasted/plain_*.py. Stages of a pipeline: pipelines.py; `lab.track_memory`: memory_tracker.py
- a program that sets up torch itself: process_group_initialization.py, rendezvous.py, rpc_initialization.py; tests
  test_initialization.py, notebook/test_pasted.py
- a private name of torch: an entry in torch_internals.py; `test_house.py` finds any other use
- a fact of training that ranks compare after the run: training_facts.py notes it (kinds: recording/rank_facts.py);
  tracing/verdict.py (between ranks) or group/same_as_serial.py (with one rank) compares it; the cure is in
  tracing/silent_faults.py; tests tracing/test_verdict.py, group/test_same_as_serial.py
- emulated links: emulated_link.py, emulated_rpc.py; how long operations take on them: costs/emulated_costs.py; tests
  test_emulated_link.py, test_emulated_network.py
- which time limits are the program's own: time_limits.py; what a failed wait waited for:
  group/deadlock_monitor.py; tests group/test_no_deadlock.py
"""
