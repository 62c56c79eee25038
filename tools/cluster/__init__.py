"""Runs and trials on the machines of a Ray cluster.

    connection  connects to a cluster, and says what is on it
    actors      those that have no job at the moment
    ahead       places that are prepared before the first runs
    job         one job of the command: sent to a machine, its files mirrored, sent to another if the machine is lost
    inputs      files that jobs read, by digest: code, apps, data sets
    machine     the Ray actor of a job on its machine: keeps files, starts the job's process, reads what it writes
    process     the job's process, which does several jobs in turn
    there       the functions that this process calls: a run, or the clients of one
    engine      the engine whose runs are such jobs

Nothing is assumed on a shared disk. The command asks its actors at intervals what has changed; it can ask the same
again, so that no answer can be lost. Every file of a run is then on the command's machine: if another machine dies, the
run goes on from its last checkpoint elsewhere.
"""
