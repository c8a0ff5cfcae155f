"""Import of finished results into MLflow, in a separate step that no training run depends on."""
