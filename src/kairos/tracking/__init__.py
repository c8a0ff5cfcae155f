"""Results in trackers: live reports of a run to MLflow, import of finished results into it, and export.

Export is to TensorBoard, Weights & Biases and the Hugging Face hub. No training run depends on a tracker.
"""
