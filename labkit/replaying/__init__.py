"""Replay: a trace as a graph of events, and what it would look like after a change."""
