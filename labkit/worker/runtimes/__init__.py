"""The runtimes: how ranks set up torch, RPC, TensorFlow or nothing ("bare"), and the registry of runtimes by name.

What to open for which change:
- add a runtime (JAX, say): a subclass of `Runtime` (base.py says what it has and does), like the one in torch.py; an
  entry in registry.py. What else knows runtimes: the argument's text in group/group.py; the extra in pyproject.toml;
  `TABLE` in notebook/doctor.py (tests worker/test_registry.py); `OPERATIONS` in notebook/measure_link.py; frames that
  tracebacks leave out: ipc/tracebacks.py; values that cannot be sent: ipc/reductions.py; library threads that wait:
  launch/thread_states.py. What a runtime does not record is in no figure, and no deadlock is found in it
- torch and RPC: torch.py; its sockets: torch_sockets.py; tests worker/comm/test_initialization.py
- torchrun's variables in ranks: base.py; a rank's GPUs, `lab.device`: devices.py; tests group/test_group.py
- modules that are imported before ranks are forked (`preload`), ranks that others can replace (`replaceable`), after
  how long they count as blocked (`certain_after_s`), and so on: attributes of the runtime; tests
  worker/tensorflow/test_tf_lost_workers.py
"""
