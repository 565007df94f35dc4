"""A request's sampling parameters as one row of device tensors; the sampler itself is an op (`kernels.ops.sample`)."""
