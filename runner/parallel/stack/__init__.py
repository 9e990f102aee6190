"""Runs that are computed together: their forward and backward passes are those of one network with stacked weights.

Each run has its own loop, optimizer and files, and the runs take turns (see `turns`). Only a pass through the network
is shared: it begins once all runs wait for theirs, and `torch.func.vmap` computes it for all of them. The weights of
each network are views of the stacked ones, which its optimizer updates in place.
"""
