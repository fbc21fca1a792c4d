"""Errors as students see them: exceptions, why a process ended, wrong arguments, numbers with units."""
