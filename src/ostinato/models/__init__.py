"""Decoder-only transformers, written once: the four architectures differ by fields of `ModelConfig`."""
