"""Draws runs: a trace in, a figure out. The live picture is in live/, the interactive timeline in explorer/.

What to open for which change:
- add a figure: a file here whose function has `@public_api` (errors/wrong_calls.py), draws into `axes_for`
  and ends with `describe` (style.py); its name in `labkit/__init__.pyi`; an entry in the tests test_kept_figures.py,
  which keep a picture of it
- a figure: timeline.py (also `lab.explore`), breakdown.py (also `lab.compare`), traffic.py (its numbers: flows.py),
  memory.py, scaling.py, what_helps.py, predictions.py, measured_link.py, guess_charts.py; tests test_figures.py
- the colour of compute, communication or waiting: `STYLES` in bars.py, which the live picture, the explorer and the
  diagrams of lessons use, too; of an operation: recording/operations.py; tests test_colors.py, test_kept_figures.py.
  Then draw again: reference pictures, `make diagrams`, `make pictures`
- what is a bar, and its text: bars.py (`caption`), in the explorer explorer/picture.js; the axis of a mesh: `axis_of`
  in recording/group_keys.py; when arrows are drawn: flows.py; which rows and steps: view.py; tests test_figures.py
- what share of the time rows compute: busy.py; when figures say that ranks shared cores: view.py; tests test_notes.py
- how wide figures are shown, their alternative text: image.py, figure.py; fonts: style.py, labkit.mplstyle; tests
  test_image.py
"""
