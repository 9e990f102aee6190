"""Command-line tools: `python -m runner.tools.NAME`, each with `--help`."""
