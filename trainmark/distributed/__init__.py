"""Ranks: the mesh, its collectives, and launching.

Begin with `mesh.py`; nothing in training knows more of ranks than it says.

    in training    mesh.py                who the ranks are, and small collectives
                   gradients.py           gradients of all ranks, added up in one buffer
                   launched.py            how a rank joins and leaves; whose error is told
                   heartbeat.py           ranks that fall silent
    launching      launch.py              `trainmark launch`, and its status, logs and stop
                   launch_options.py      what it takes
                   launch_torchrun.py     on this machine; each machine of a job runs this one
                   launch_slurm.py        on a cluster: the batch script, the job's state
                   launch_torchx.py       through TorchX
                   launch_jobs.py         jobs that outlive the command: handles, states, logs
"""
