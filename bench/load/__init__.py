"""Heavy loads, and whether the resources of a process grow under them."""
