"""Starting, connecting and supervising the processes of a run."""
