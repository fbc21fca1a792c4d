"""What goes wrong, and how it is told: exceptions, why a process ended, wrong calls, units of numbers."""
