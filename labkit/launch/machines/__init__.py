"""Ranks on several machines: a relay process beside the notebook, an agent on each machine, and what connects them.

What to open for which change:
- reach machines in another way (Dask, LSF): an `Engine` (engines.py) gives the names of the machines, and a stream to
  the agent on each, by a command as in command.py (ssh, Slurm), or as in ray.py; an engine has a name in
  `labkit/__init__.pyi`, and a section in docs/machines.md; options of ssh and Slurm: command.py; tests test_relay.py
  (ssh), test_slurm.py, test_ray.py
- the emulated machines: emulated.py; their network: emulated_network.py; tests test_emulated.py
- what relay and agents tell each other, and what must be the same on all machines: facts.py, line.py; the relay's side:
  relay.py, relayed.py; the agent's: agent.py; frames and large data: forwarding.py; tests test_relay.py, test_line.py
- how long a machine may be silent: `SILENT_S` in facts.py, from which an agent's `LOST_S` follows
- the start of ranks there, as the notebook sees it: relay_starter.py; whether machines reach each other: relay.py,
  agent.py; the report of it: notebook/doctor.py; tests test_reachability.py, notebook/test_machines_report.py
- where ranks are and listen, and their variables there: ipc/options.py; their folder: worker/process_state.py; tests
  ipc/test_machine_variables.py, worker/test_working_folder.py, worker/test_ranks_on_machines.py
"""
