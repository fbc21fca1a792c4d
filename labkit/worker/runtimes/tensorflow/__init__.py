"""TensorFlow in a rank: its cluster, its collectives on the timeline, and defects that are worked around."""
