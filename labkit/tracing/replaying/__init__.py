"""Replay: a trace as a graph of events, and what it would look like after a change.

The package is not called `replay`: importing it would set that attribute of `labkit`, which is the function.
"""
