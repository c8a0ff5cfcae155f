"""Inspection of training runs, queue and machine for `kairos status` and `kairos doctor`; imports no torch."""
