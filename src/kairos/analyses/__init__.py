"""Analyses that explain a comparison, each a table and a figure.

`settings` lists the analyses, and `tables` writes their tables. `noise_levels` and `interdependence` measure
networks at snapshots, with `gradients`. `recorded_results` evaluates no network. The figures are in
`kairos.report.analysis_figures`.
"""
