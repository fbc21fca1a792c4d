"""How ranks are started, asked and ended; runs in the notebook's process and in the server that forks ranks."""
