"""Measurements that explain a comparison, each a table and a figure that can stand in a paper.

`registries` names them, `gradients` and `interdependence` look at networks, `records` at what trainings have left,
`tables` puts rows together; the figures are in `kairos.report.analysis_figures`.
"""
