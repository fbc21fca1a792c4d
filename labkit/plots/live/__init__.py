"""The live picture under a cell: what `group.watch` shows while a run goes on."""
