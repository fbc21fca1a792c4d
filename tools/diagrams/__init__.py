"""Diagrams of the lessons as SVG: `kit` has shapes and colours, each lesson has a file, and `draw` lists them."""
