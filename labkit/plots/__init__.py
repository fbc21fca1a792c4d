"""Draws runs: a trace in, a figure out.

The live picture is in `live`, the interactive timeline's widget in `explorer`.
"""
