"""The course: exercises and guesses, lessons and their data; classroom/ hands them out and grades them.

What to open for which change:
- guesses: guesses.py (`lab.guess`, `lab.reveal`, and the file that keeps them); their pictures: plots/guess_charts.py.
  A unit: how a quantity's name ends, `UNITS` there; its size, for predictions and runs: costs/prediction.py
- the student's copies of the lessons; `make lab`, its settings in lab_settings/: lessons.py
- data sets and models of lessons: data.py, models/in_torch.py, models/in_keras.py
- programs with a fault (`lab.fault`), which stand in notebooks/faults/: faults.py; docs/faults.md: tools/faults.py
- a new lesson: `make lesson NAME=19_my_topic`; what that writes: tools/lesson_template/, tools/new_lesson.py
"""
