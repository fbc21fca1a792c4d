"""The parts that belong to a notebook: `Group` with the live picture, `%%ranks`, `doctor` and `measure_link`.

What to open for which change:
- what `%%ranks` and `%%rank` accept: ranks_magic.py; what a cell may contain: ipc/ranks_cell.py; another magic: also
  on_import.py; tests test_ranks_magic.py
- what `import labkit` starts: on_import.py; tests test_kernel.py, test_terminal.py
- one more fact of `lab.doctor` (what a machine offers is read in launch/capacity.py), or one more package: an entry of
  `TABLE` in doctor.py; GPUs and hosted services: doctor_facts.py; the form, and asking other processes: findings.py
- the hint after `mp.spawn` or a launcher in a cell: spawn_hint.py
- what `lab.measure_link` measures: measure_link.py; its figure: plots/measured_link.py; its fit: costs/fit.py
- `lab.Group`, a group with the live picture: watched_group.py; presses of Stop in lessons: press_stop.py
"""
