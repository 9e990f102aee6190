"""Runs that are computed together: their forward and backward passes are those of one network with stacked weights.

Each run has its own loop, optimizer and files, and the runs take turns (see `turns`). Only a pass through the network
and an update are shared: they begin once all runs wait for theirs. `torch.func.vmap` computes a pass for all of them;
the weights of each network are views of the stacked ones, which the update changes in place.
"""
