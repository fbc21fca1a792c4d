"""The same work done by labkit, by other tools, and by the bare forkserver that is the lower bound."""
