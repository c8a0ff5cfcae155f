"""Costs of an experiment, estimated before any of it runs."""
