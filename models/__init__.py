"""Networks: layers and nothing else. They know no device, rank, precision or config.

Each is imported from its own module: torchvision takes a second to load, and a small network does not need it.
"""
