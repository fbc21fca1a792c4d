"""The diagrams of the lessons, drawn as SVG: `kit` has the shapes, `draw` writes the files, and each lesson has a file."""
