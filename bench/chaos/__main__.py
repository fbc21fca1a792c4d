"""`make chaos`, or `python -m bench.chaos --rounds 300 --seed 7`."""

from bench.chaos.rounds import main

main()
