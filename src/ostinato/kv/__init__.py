"""The KV cache: which blocks belong to whom (ids only, no torch) and the tensors behind them."""
