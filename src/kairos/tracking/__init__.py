"""Import of finished results into MLflow, in a step of its own that no training depends on."""
