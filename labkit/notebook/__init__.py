"""What only a notebook has: the Group with a live picture, `%%ranks`, `doctor` and `measure_link`."""
