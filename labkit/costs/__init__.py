"""The cost of communication and training: links, closed-form predictions, fits, emulated links, and `lab.plan`.

What to open for which change:
- a link preset: the end of link.py; a predefined device, or what is measured of this machine: device.py
- a prediction: predict.py (a new one also in `__all__`; collectives with a cost in recording/operations.py have one);
  its algorithms and their rounds: rounds.py; its form, and its units: `UNITS` in prediction.py; what it accepts:
  checked_arguments.py; tests test_predict.py, plots/test_predictions.py. Beside measurements: `python -m
  bench.speed.predictions`
- how a network of nodes is modelled: network.py (who is where), rounds.py (who sends to whom), emulated_costs.py (what
  an operation occupies); tests also worker/comm/test_emulated_network.py
- how ranks share an emulated link: shared_link.py; tests test_network.py. In a rank: worker/comm/emulated_link.py
- fits to measured times: fit.py; what is measured: notebook/measure_link.py
- a formula of `lab.plan`: estimate.py (memory, times), workload.py (sizes of a model), cluster.py (communication along
  an axis), and docs/planning.md; another strategy: strategy.py; tests test_estimate.py
- the table of `lab.plan`, and what `break_even` varies: plan.py
"""
