"""What travels between the notebook and its ranks: functions, arguments, results, errors, prints."""
