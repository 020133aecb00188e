"""Sandbox for programs that a model wrote.

In: programs and their limits. Out: what each printed, and how it ended.
Imports: types, errors, config, cluster.

::

    pool.py      SandboxPool: `await pool.run(program)` on a fixed number of slots;
                 `run_joined` for two programs that exchange messages                     (asyncio shell)
      warden.py  one small process per slot: starts and watches programs, cleans up        (shell)
        jail.py      environment of a program: bubblewrap's arguments, rlimits, uid        (pure; the child)
        seccomp.py   system calls that a program may make, as a BPF program                (pure)
        landlock.py  files that it may open where namespaces are forbidden                 (ctypes)
        users.py     a separate user id for each slot
        cgroups.py   limits on all its processes together                                  (files)
      verdict.py     status of a program, from the warden's observations                   (pure)
    probe.py     test of the protection at start                                           (pure)
      payload.py program that tries to break out, from inside
    model.py     Limits, Program, Outcome, Plan, SandboxError
    wire.py      frames between pool and warden

A program runs under one of two tiers of protection, or not at all. `namespaces`: bubblewrap with seccomp.
`landlock`, where namespaces are forbidden: Landlock and seccomp, a single process. At start the pool takes
the first tier that the probe cannot break out of.
"""
