"""Side by side against plain PyTorch and its peers; `results/` holds what was measured, where and how."""
