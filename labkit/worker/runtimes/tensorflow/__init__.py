"""The TensorFlow runtime: the cluster, operations on the timeline, and workarounds for bugs of TensorFlow and Keras.

What to open for which change (tests in tests/worker/tensorflow/):
- TF_CONFIG, devices and threads: runtime.py; programs that set TF_CONFIG themselves, checks of strategies: patches.py;
  tests test_tensorflow.py, test_tf_careless.py
- patch TensorFlow or Keras: its names in tensorflow_internals.py, and a row in docs/programs.md; the code is in
  servers.py (ports), profiler_defect.py (a crash), or else patches.py; tests
  test_tensorflow_internals.py, test_tf_careless.py, test_tf_servers.py, test_tf_profiler_defect.py
- the timeline: profiler_timeline.py (runs the profiler, writes spans), profiler_events.py (phases,
  collectives, messages); tests test_tf_timeline.py. Their bytes: sizes.py; tests
  test_tf_sizes.py
- in which call a rank is blocked: blocked.py; tests test_blocked.py
- batches that leave a replica without samples: patches.py; tests tracing/test_verdict.py
"""
