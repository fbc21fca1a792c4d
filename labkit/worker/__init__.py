"""A rank's process: how it starts and ends, its main loop, and the state that it copies from the notebook."""
