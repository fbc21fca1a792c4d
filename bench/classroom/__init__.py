"""A class of 30 made-up submissions of lesson 02, graded by `python -m labkit grade`, nbgrader and Otter."""
