"""Settings of a run: declared (`schema`, on the fields of `fields`), and the files they are read from.

In: YAML and JSON that a person wrote or named. Out: a frozen `Config`, or one line that says what is wrong.
`loop.loading` puts one together from the words of a command line.
Imports: errors.
"""
