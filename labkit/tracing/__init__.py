"""Traces: the recorded spans of a run as data, with their arithmetic and their files."""
