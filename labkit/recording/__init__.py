"""Records what a rank does (spans, scalars, pending operations), and the shared memory that holds the records."""
