"""Heavy loads, and whether what a process holds grows under them."""
