"""What is measured, logged and shown."""
