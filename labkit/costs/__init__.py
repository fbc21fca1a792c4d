"""The cost of communication: links, closed-form predictions, fits to measured times, the clock of emulated links."""
