"""A class: `python -m labkit grade` judges submissions. Nothing else of labkit imports this package.

What to open for which change:
- options of `grade`: grade.py, `GradeSettings` in grade_submission.py, and docs/teaching.md; which files it reads (no
  zip files), and whose: submissions.py; forms of results: `FORMS` in results.py; tests test_grade.py
- what a submission may do, time, memory, output: confined_process.py; the order of the processes of one submission:
  grade_submission.py, submission_process.py (its statements), judge_process.py (the judges); tests test_grade.py,
  test_confined_process.py
- which statements an answer needs: statements.py; how answers reach ranks, which pickles are read: packed_answer.py
- hand out in another form: a function in a file like for_otter.py, for_nbgrader.py or for_hosted.py, in `FORMS` of
  assign.py; what students get: handout.py; which cells graders execute: grader_plugins.py; tests test_assign.py
"""
