"""Groups on several machines, beside other tools on the same two."""
