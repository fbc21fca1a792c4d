"""Makes this folder a package: IPython 7 puts another package `tests` on the path, which would win otherwise."""
