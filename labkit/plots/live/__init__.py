"""The live picture under a cell: what `group.watch` shows while a run goes on.

What to open for which change (tests plots/test_live.py):
- what is drawn of a frame, in notebooks that are not trusted, too: drawing.py; texts that must fit: tests
  plots/test_frame_texts.py
- the line of progress (steps, rate, time left, last values): `Progress` in recent.py; its steps are those of
  `lab.steps`, which records how many there are (`STEPS_IN_ALL`), or those found automatically (recording/record.py)
- curves of `lab.record`, here and below the timeline: curves.py
- which spans are remembered: recent.py; how often a frame is drawn, a terminal's line: live.py
- memory and GPU of ranks: `Load` in launch/resource_usage.py; the title: `Execution.wait` in group/run.py
"""
