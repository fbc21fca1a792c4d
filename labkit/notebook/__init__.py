"""The parts that belong to a notebook: `Group` with the live picture, `%%ranks`, `doctor` and `measure_link`."""
