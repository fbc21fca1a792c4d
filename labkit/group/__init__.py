"""Groups of ranks, in the notebook's process: starts ranks, runs functions on them, detects deadlocks, ends ranks.

Nothing in this package draws; a live picture is passed in as a `picture.Picture`.
"""
