"""Sends functions, arguments, results, errors and printed output between the notebook and its ranks."""
