"""One run, from the words of its command line to its summary.

`loading`, `preflight` and `resume` come before anything starts; `launch` starts the actors; `controller`
decides (events in, actions out, pure), `runner` does it, through the interfaces of `planes`; `accounting`
writes down what happens, `reconcile` keeps the fleet. Imports: all but testing and sim. Ray: in
`launch` alone.
"""
