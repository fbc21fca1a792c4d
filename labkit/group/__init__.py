"""Groups of ranks in the notebook's process: started, called, watched over, ended. It knows nothing of figures."""
