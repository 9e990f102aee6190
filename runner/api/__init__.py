"""What `import runner` offers: composing a config, training it, and evaluating or using a saved run."""
