"""The parts of a pipeline: partition, stages, schedules, and measurements."""
