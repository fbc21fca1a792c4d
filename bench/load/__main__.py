"""`python -m bench.load`: all loads at full size."""

from bench.load.report import main

main()
