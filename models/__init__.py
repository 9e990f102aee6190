"""Networks in plain PyTorch, independent of device, rank, precision and config.

Nothing is imported here: torchvision takes a second to import, and some of the networks do not need it.
"""
