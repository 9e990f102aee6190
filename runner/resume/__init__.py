"""Which run to resume (starting_point.py), and which of its options may change (changed_options.py)."""
