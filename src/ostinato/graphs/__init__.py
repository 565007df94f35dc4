"""CUDA graphs: which to record (mode, buckets, dispatch), how (recorder, backends) and how to know that they are right.

`mode`, `buckets` and `dispatch` are plain Python and never import torch, so import from the modules, not from here.
"""
