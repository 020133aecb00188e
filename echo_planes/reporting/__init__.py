"""Everything that a user reads: the terminal, report.html, the viewer, tables of stored weights.

Input: the files of a run folder, which `metrics` describes. Output: text and pages.
Imports: types, errors, config, cluster, weights, data, fleet.
"""
