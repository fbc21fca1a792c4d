"""Ranks on several machines: a relay process beside the notebook, an agent on each machine, and what connects them."""
