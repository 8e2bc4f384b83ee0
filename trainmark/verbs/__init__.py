"""What the verbs do around a run; the command line only names them.

flags.py            from words to a run and its options; flag_errors.py: wrong words as a sentence;
                    aliases.py: what other systems call our flags; options.py: flags of verbs
runs.py             list, show, train, infer
evaluate.py         how good a run's predictions are
plan.py             memory and predicted time before a run; plan_search.py: other layouts of it;
                    plan_check.py: predictions beside what was measured
calibrate.py        the rates of this machine, for plan; calibrate_steps.py: what whole steps take besides
board.py            the page of many runs, written or served
export.py           a checkpoint in the layout of other software
verify.py           whether every byte is as it was written; replay.py: a result's command again
gate.py             whether a step takes longer than it did; gate_turns.py: two processes that
                    train by turns; gate_worker.py: what each of them runs
suite.py            a list of cases; suite_cases.py reads and checks it
sweep.py            many runs that differ in some fields; sweep_space.py: which; sweep_search.py: by
                    Optuna; sweep_trials.py: what a sweep remembers
attempt.py          one run of many, in its own process or here; attempt_tables.py: the tables
"""
