"""Diagrams of the lessons as SVG: `kit` has the shapes, each lesson has a file, and `draw` writes the pictures."""
