"""A few ranks of many, executed on tensors without data: what they compute, send and wait for, and when.

The package is not called `simulate`: importing it would set that attribute of `labkit`, which is the function.
"""
