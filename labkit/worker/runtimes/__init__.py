"""The runtimes: how ranks set up torch, RPC, TensorFlow or nothing ("bare"), and the registry of runtimes by name."""
