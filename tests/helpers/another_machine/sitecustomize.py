"""Makes the second node of torchrun look like another machine: another name, and a clock an hour ahead and 20 µs/s
fast."""

import os
import socket
import time

if os.environ.get("GROUP_RANK") == "1":
    _true = time.perf_counter_ns
    _began_ns = _true()
    time.perf_counter_ns = lambda: (now := _true()) + 3_600 * 10**9 + (now - _began_ns) // 50_000
    socket.gethostname = lambda: "another"
