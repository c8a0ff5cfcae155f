"""Texts become the states of a text encoder, once, before any training."""
