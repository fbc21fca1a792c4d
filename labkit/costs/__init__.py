"""What communication costs: links, closed formulas and predictions, fits to measured times, emulated links shared by ranks."""
