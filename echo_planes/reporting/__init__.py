"""Everything that a person reads: the terminal, report.html, the viewer, tables of stored weights.

In: the files of a run folder (`metrics` says what is in them). Out: text and pages.
Imports: types, errors, config, cluster, weights, data, fleet.
"""
