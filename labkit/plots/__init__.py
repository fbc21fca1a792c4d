"""Figures: the timeline, breakdown, traffic, memory, and what they share."""
