"""The command line: its arguments, its help, and the run or sweep that it starts."""
