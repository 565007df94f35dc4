"""Checkpoints: where a model's configuration, tensors and tokenizer come from.

`checkpoint.open_checkpoint` is the way in. Whatever the container (safetensors folder, GGUF file), what comes out has
Hugging Face's names, shapes and config keys, so that the models know one vocabulary only.
"""
