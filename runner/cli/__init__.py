"""The command: arguments, help, and one run or sweep from them."""
