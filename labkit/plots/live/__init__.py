"""The live picture under a cell, frame by frame."""
