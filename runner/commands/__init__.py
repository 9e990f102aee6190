"""The subcommands: `python -m runner NAME …` runs `main` of the module NAME."""

# Nothing is imported here: `python -m runner` runs this file before it removes the working directory from its path.

COMMANDS = {
    "doctor": "describes this machine, and what will run on it",
    "plan": "predicts memory, messages and the bubble of a pipeline, without training",
    "tune": "finds the fastest way to train a config on this machine",
    "verify": "compares a config with plain training on a single device, or a recorded run with today's code",
    "sweep": "shows what became of the jobs of a sweep",
    "runs": "lists the runs below a directory",
    "compare": "prints a table of runs: their options and results",
    "plot": "draws the figures of a sweep",
    "evaluate": "evaluates a checkpoint of a run",
    "predict": "predicts the classes of images",
    "play": "shows or films a trained agent",
    "convert": "extracts the weights of a run, or converts a file of weights",
}
"""The name and the description of each subcommand."""
