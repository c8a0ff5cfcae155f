"""Text encoders, which convert captions to conditions once, before any training run."""
