"""How long things take beside their floors, and predictions beside measurements."""
