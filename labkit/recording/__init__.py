"""Recording of what a rank does (spans, scalars, pending operations) in shared memory."""

from typing import Final

TRACE_VARIABLE: Final = "LABKIT_TRACE"  # names the folder in which a script started by torchrun saves what its ranks record
TRACE_FOLDER: Final = "labkit-trace"  # used by `python -m labkit` if the variable is not set
