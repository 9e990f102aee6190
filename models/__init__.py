"""Networks in plain PyTorch, independent of device, rank, precision and config."""
