"""Programs beside the runner: `python -m runner.tools.NAME`, each with `--help`."""
