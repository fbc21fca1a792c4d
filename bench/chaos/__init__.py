"""Random faults at random moments, and whether a group recovers from them."""
