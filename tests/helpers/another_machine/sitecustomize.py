"""Makes the second node of torchrun look like another machine: another name, and a clock an hour ahead and 20 µs/s
fast."""

import os
import socket
import time

if os.environ.get("GROUP_RANK") == "1":
    _true = time.perf_counter_ns
    time.perf_counter_ns = lambda: (now := _true()) + 3_600 * 10**9 + now // 50_000  # the same in all its processes
    socket.gethostname = lambda: "another"
