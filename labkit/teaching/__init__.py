"""The course: exercises and guesses, lessons and their data; `classroom/` hands them out and grades them."""
