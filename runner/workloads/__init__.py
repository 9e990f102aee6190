"""What is trained: a model, its batches, its loss and its evaluation. `base.py` is the contract."""
