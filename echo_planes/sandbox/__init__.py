"""Programs that a model wrote, run where they can do no harm.

::

    pool.py      SandboxPool: `await pool.run(program)`, a fixed number of slots; two
                 programs that speak with each other: `run_joined`                        (asyncio shell)
      warden.py  one small process for each slot: starts, watches, ends and clears         (shell)
        jail.py      what a program is started in: bubblewrap's arguments, rlimits, uid    (pure; the child)
        seccomp.py   the system calls it may make, as a BPF program                        (pure)
        landlock.py  the files it may open where namespaces are forbidden                  (ctypes)
        users.py     a user id of its own for each slot
        cgroups.py   what all its processes may use together                               (files)
    probe.py     what is tried at start to see whether the walls stand                     (pure)
      payload.py the program that tries it, from inside
      verdict.py what became of a program, from what was seen of it                        (pure)
    model.py     Limits, Program, Outcome, Plan, SandboxError
    wire.py      frames between pool and warden

A program runs behind one of two walls, or not at all. `namespaces`: bubblewrap, with seccomp. `landlock`,
where namespaces are forbidden: Landlock and seccomp, a single process. Which one it is, is found out at start
by trying to break out of it.
"""
