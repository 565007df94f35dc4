"""One function per op of a step: a torch reference (the spec, the CPU path, the oracle) and a Triton kernel.

`ops` is the only module that the rest of the package imports. It registers `torch.ops.ostinato.*`, so that to a graph
or a tape each op is one opaque node whose schema says what it mutates. Importing it imports neither implementation:
`reference*.py` is loaded at the first CPU call, `triton_*.py` at the first CUDA call.
"""
