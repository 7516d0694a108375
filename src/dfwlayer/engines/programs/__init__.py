"""Whole problems inside of one Triton program each, on a GPU.

The twin of `dfwlayer.engines.compiled` for batches that are on a GPU already: the same normal
forms, the same rules for what is beyond doubt, and one launch for all problems forwards and one
backwards. What it leaves, single problems of a batch included, goes on to the engines of
`dfwlayer.engines`.
"""
