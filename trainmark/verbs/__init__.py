"""What the verbs do around a run; the command line only names them.

Flags
    flags.py            from words to a run and its options; options.py: the verbs' own flags
    flag_errors.py      wrong flags, as one sentence

Verbs
    runs.py             list, show, train, infer
    evaluate.py         how good a run's predictions are
    plan.py             memory and predicted time; plan_search.py: other layouts of a run;
                        plan_check.py: predictions beside what was measured
    calibrate.py        measures this machine, for plan; bench.py: rates of a device;
                        calibrate_steps.py: whole steps on CPUs
    board.py            the page of many runs, written or served
    export.py           a checkpoint in the layout of other software
    verify.py           whether every byte is as it was written
    replay.py           the command of a result
    gate.py             whether a step is slower; gate_turns.py: two processes that take turns;
                        gate_worker.py: the script that each of them runs
    suite.py            a list of cases; suite_cases.py: reads and checks it
    sweep.py            many runs that differ in some fields; sweep_space.py: which fields;
                        sweep_search.py: a search by Optuna; sweep_trials.py: sweep.json

What sweep and suite share
    attempt.py          one run of many, in this process or in another
    attempt_tables.py   the tables of their outcomes
"""
