"""Networks in plain PyTorch, independent of device, rank, precision and config.

Nothing is imported here: torchvision takes a second to import, and only `models.resnet` needs it.
"""
