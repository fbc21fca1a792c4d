"""What a run leaves behind: a trace, its arithmetic and its files."""
