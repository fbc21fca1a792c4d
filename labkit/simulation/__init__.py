"""One rank of many, executed on tensors without data: what it computes, sends and waits for."""
