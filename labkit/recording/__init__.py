"""What a rank writes down, and the shared memory that it writes to: spans, scalars, operations under way."""
