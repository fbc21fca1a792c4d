"""`make bench`, or `python -m bench.speed`."""

from bench.speed.report import main

main()
