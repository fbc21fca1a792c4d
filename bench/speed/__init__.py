"""Times beside their lower bounds, and predictions beside measurements."""
