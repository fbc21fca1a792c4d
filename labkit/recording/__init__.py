"""Recording of what a rank does (spans, scalars, pending operations) in shared memory."""
