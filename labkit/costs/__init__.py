"""The cost of communication and training: links, closed-form predictions, fits, emulated links, and `lab.plan`.

What to open for which change:
- a link preset: the end of link.py; a predefined device, what a `Device` has, or what is measured of this machine:
  device.py
- a prediction: predict.py (a new one also in `__all__`; collectives with a cost in recording/operations.py have one);
  its algorithms and their rounds: rounds.py; its form, its units (`UNITS`) and what it accepts: prediction.py; tests
  test_predict.py, plots/test_predictions.py. Beside measurements: `python -m bench.speed.predictions`
- how a network of nodes is modelled: network.py (who is where), rounds.py (who sends to whom)
- what an operation occupies on an emulated link, and how ranks share it: shared_link.py; tests test_network.py,
  worker/comm/test_emulated_network.py. In a rank: worker/comm/emulated_link.py
- fits to measured times: fit.py; what is measured: notebook/measure_link.py
- what an operator computes, reads and writes, in `lab.simulate` and `lab.plan` alike: kernels.py; how long a device
  takes for it: `Kernel` in device.py
- a published model: the end of transformer.py; what its layers compute: transformer_parts.py; how the passes of these,
  or of any module, are counted: passes.py; tests test_passes.py
- a formula of `lab.plan`: estimate.py (times; memory by `PLANNED_KINDS`, from which the table takes its columns),
  workload.py (sizes of a model), cluster.py (strategies, and communication along an axis of them), and
  docs/planning.md; tests test_estimate.py
- the table of `lab.plan`, and what `break_even` varies: plan.py
"""
