"""The TensorFlow runtime: the cluster, operations on the timeline, and workarounds for bugs of TensorFlow and Keras."""
