"""Settings of a run: their declaration (`schema`, `fleet`, `fields`), and the reading of their files.

In: YAML and JSON files that a user wrote or named. Out: a frozen `Config`, or an error message of one line.
`loop.loading` builds a `Config` from the words of a command line.
Imports: errors.
"""
