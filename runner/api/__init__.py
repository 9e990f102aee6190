"""What `import runner` offers: composing a config, training it, and what comes after a run."""
