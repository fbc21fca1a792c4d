"""`python -m bench.classroom --by grade`, or nbgrader or otter."""

from bench.classroom.rows import main

main()
