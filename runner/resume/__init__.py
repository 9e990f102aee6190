"""Where a run continues: the run directory, the run to resume, and which options may change."""
