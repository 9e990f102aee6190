"""The parts of a pipeline: partition, stages, schedules, and what is measured of them."""
