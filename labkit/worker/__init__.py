"""A rank's process: how it starts and ends, its main loop, and what it takes over from the notebook."""
