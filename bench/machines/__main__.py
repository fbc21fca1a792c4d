"""`python -m bench.machines`."""

from bench.machines.rows import main

main()
